"""A node's address and capacities."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tiers.errors import ConfigurationError
from tiers.policy.quota import QuotaShares
from tiers.remote.settings import RemoteSettings

OTHERS = "*"  # in quotas: each scope whose owner has no quota


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """A node's settings. Each layout has its own disk folder; all share the remote tier."""

    socket: Path
    host_bytes: int
    disk_dir: Path | None = None
    disk_bytes: int = 0  # per layout
    disk_reserve_bytes: int | None = None  # of its file system; see `tiers.disk.room`
    remote: RemoteSettings | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)  # bytes by owner; * is any other scope

    def shares(self, owner_of: Callable[[Hashable], Hashable]) -> QuotaShares | None:
        """The quotas as shares. Raises ConfigurationError if they promise more than there is."""
        if not any(self.quotas.values()):
            return None
        named: dict[Hashable, int] = {who: n for who, n in self.quotas.items() if who != OTHERS}
        total = self.host_bytes + (self.disk_bytes if self.disk_dir else 0)
        return QuotaShares(total, named, self.quotas.get(OTHERS, 0), owner_of)

    def check(self) -> None:
        """Check what `open` needs. Raises ConfigurationError."""
        if self.remote is None:
            return
        if self.disk_dir is None:
            raise ConfigurationError(
                "a remote tier needs a disk tier, because its blocks pass through it; name one "
                "with --disk-cache-dir, or leave --remote-url out"
            )
        self.remote.check()
