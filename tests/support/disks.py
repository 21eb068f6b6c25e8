"""Disk tiers that are closed when their test ends, by a fixture of the unit tests; what is stored
and loaded there; and the order in which a shard evicts."""

from collections.abc import Sequence

from tests.patience import until
from tests.support.faulty_storage import LAYOUT, SCOPE, chain, fetched, put, take
from tiers.blocks.frames import FrameArena
from tiers.blocks.keys import BlockId, CacheScope, PrefixKey
from tiers.disk.format.rows import unpack_order
from tiers.disk.shard import Shard
from tiers.disk.tier import DiskTier
from tiers.remote.tier import RemoteTier
from tiers.tier import Loaded, Tier

CAPACITY = 2 << 20
FRAMES = take(FrameArena(LAYOUT, 17), 17)
_OPEN: list[DiskTier] = []


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


def closed_later(tier: DiskTier) -> DiskTier:
    _OPEN.append(tier)
    return tier


def close_all() -> None:
    while _OPEN:
        _OPEN.pop().close()


def blocks(seed: int = 0, count: int = 4, scope: CacheScope = SCOPE) -> list[BlockId]:
    return chain(count, block_size=LAYOUT.block_size, seed=seed, scope=scope)


def store(tier: Tier, ids: Sequence[BlockId]) -> list[PrefixKey]:
    return put(tier, ids, FRAMES)


def load(tier: Tier, ids: Sequence[BlockId]) -> Loaded:
    return fetched(tier, ids, FRAMES)


def oldest_first(shard: Shard) -> list[PrefixKey]:
    """The keys of its records, the next to be evicted first."""
    with shard._reading() as snapshot:
        return [unpack_order(data)[0] for _, data in snapshot.rows("order")]


def publish_all(remote: RemoteTier) -> None:
    """Wait until what is queued for the store was sent."""
    until(lambda: not remote._waiting.unfinished_tasks)
