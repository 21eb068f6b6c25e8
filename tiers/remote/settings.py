"""Settings of the remote tier: where it is and what is sent to it."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tiers.remote.objects import ObjectStore, open_objects, shown_url
from tiers.remote.seal import Seal, read_seal

TIMEOUT_S = 1.0  # for an answer of the store; a later one is a miss


class RemoteWrites(StrEnum):
    """Which blocks are sent to the remote tier."""

    REUSED = "reused"  # blocks hit twice, and pinned blocks
    ALL = "all"  # every block written to disk


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Where the remote tier is, what is sent to it, and the key that seals its records."""

    url: str
    writes: RemoteWrites = RemoteWrites.REUSED
    key_file: Path | None = None

    @property
    def shown_url(self) -> str:
        return shown_url(self.url)

    def check(self) -> None:
        """Check what `open` needs, without a call to the store. Raises ConfigurationError."""
        objects, _ = self.open()
        objects.close()

    def open(self) -> tuple[ObjectStore, Seal | None]:
        """The store, without a call to it yet, and the seal. Raises ConfigurationError."""
        seal = read_seal(self.key_file) if self.key_file is not None else None
        return open_objects(self.url, TIMEOUT_S), seal
