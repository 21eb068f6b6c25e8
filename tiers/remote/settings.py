"""Where the remote tier is and what is sent to it, as settings and commands say."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tiers.remote.objects import ObjectStore, open_objects, shown_url
from tiers.remote.seal import Seal, read_seal

TIMEOUT_S = 1.0  # for an answer of the store; later is a miss


class RemoteWrites(StrEnum):
    """Which blocks are sent to the remote tier."""

    REUSED = "reused"  # what was hit twice, and what is pinned
    ALL = "all"  # everything that is written to disk


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Where the remote tier is, what is sent to it, and the key that it is sealed with."""

    url: str
    writes: RemoteWrites = RemoteWrites.REUSED
    key_file: Path | None = None

    @property
    def shown_url(self) -> str:
        return shown_url(self.url)

    def check(self) -> None:
        """Raises ConfigurationError for what cannot be opened later; asks no store."""
        objects, _ = self.open()
        objects.close()

    def open(self) -> tuple[ObjectStore, Seal | None]:
        """The store, not asked yet, and the seal. Raises ConfigurationError."""
        seal = read_seal(self.key_file) if self.key_file is not None else None
        return open_objects(self.url, TIMEOUT_S), seal
