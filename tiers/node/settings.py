"""Where a node listens and how much it may hold."""

from dataclasses import dataclass
from pathlib import Path

from tiers.errors import ConfigurationError
from tiers.remote.settings import RemoteSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Each layout has a disk folder of its own, and the remote tier is for all of them."""

    socket: Path
    host_bytes: int
    disk_dirs: tuple[Path, ...] = ()
    disk_bytes: int = 0  # for each layout
    remote: RemoteSettings | None = None

    def check(self) -> None:
        """Raises ConfigurationError for what cannot be opened later."""
        if self.remote is None:
            return
        if not self.disk_dirs:
            raise ConfigurationError(
                "a remote tier needs a disk, which its blocks pass through; name one with "
                "--disk-cache-dir, or leave --remote-url out"
            )
        objects, _ = self.remote.open()
        objects.close()
