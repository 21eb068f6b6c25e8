"""Disk tiers that are closed when their test ends, by a fixture of the unit tests; and the order
in which a shard evicts."""

from tiers.blocks.keys import PrefixKey
from tiers.disk.format.rows import unpack_order
from tiers.disk.shard import Shard
from tiers.disk.tier import DiskTier

_OPEN: list[DiskTier] = []


def closed_later(tier: DiskTier) -> DiskTier:
    _OPEN.append(tier)
    return tier


def close_all() -> None:
    while _OPEN:
        _OPEN.pop().close()


def oldest_first(shard: Shard) -> list[PrefixKey]:
    """The keys of its records, the next to be evicted first."""
    with shard._reading() as snapshot:
        return [unpack_order(data)[0] for _, data in snapshot.rows("order")]
