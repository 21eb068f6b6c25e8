"""Blocks made from a seed, and a disk that fails on purpose.

- `FaultyStorage`: the Nth operation, any or of one name, raises.
- `LyingStorage`: reads return fewer bytes, or bytes with one bit changed.
- `KillingStorage`: the process dies the Nth time it reaches a named point of a write.
"""

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tiers.blocks.frames import Frame, FrameArena
from tiers.blocks.keys import BlockId, CacheScope, PrefixKey, block_ids, token_bytes
from tiers.blocks.layout import BlockLayout
from tiers.disk.storage import DataFile, MapFull, Storage
from tiers.disk.transaction import PAGE_HEADER
from tiers.tier import Loaded, Tier

SCOPE = CacheScope(weights=b"tiny", tenant=b"tester")
LAYOUT = BlockLayout.uniform(2, 16, 2, 16, "float32")  # blocks of 4 KiB


def chain(
    num_blocks: int, *, block_size: int, seed: int = 0, scope: CacheScope = SCOPE
) -> list[BlockId]:
    """The identities of the blocks of one random prompt."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, num_blocks * block_size)
    return block_ids(scope.root(), token_bytes(tokens.tolist()), block_size)


def fill(frame: Frame, block: BlockId) -> None:
    """Fill a frame with values unique to this block, with exponents like those of KV."""
    seed = int.from_bytes(block.key[:8], "little")
    values = np.random.default_rng(seed).normal(size=len(frame.buffer) // 4).astype("<f4")
    if frame.tensor.element_size() == 2:
        values = np.repeat(values.view("<u4") >> 16, 2).astype("<u2")
    frame.buffer[:] = values.tobytes()[: len(frame.buffer)]


def wipe(frames: Sequence[Frame]) -> None:
    """Overwrite frames, so that a load that wrote nothing is noticed."""
    for frame in frames:
        frame.buffer[:] = b"\xa5" * len(frame.buffer)


def holds(frame: Frame, block: BlockId, spare: Frame) -> bool:
    """Whether `frame` holds exactly what `fill` writes for `block`."""
    fill(spare, block)
    return frame.buffer == spare.buffer


def take(arena: FrameArena, count: int) -> list[Frame]:
    """Take `count` free frames."""
    frames = [frame for frame in (arena.take() for _ in range(count)) if frame is not None]
    assert len(frames) == count, f"the arena has {len(frames)} free frames, not {count}"
    return frames


def put(tier: Tier, ids: Sequence[BlockId], frames: Sequence[Frame]) -> list[PrefixKey]:
    """Store blocks from these frames; returns the keys that were refused or evicted for them."""
    for frame, block in zip(frames, ids, strict=False):
        fill(frame, block)
    return list(tier.store(ids, frames[: len(ids)]))


def fetched(tier: Tier, ids: Sequence[BlockId], frames: Sequence[Frame]) -> Loaded:
    """Load blocks, and compare every byte of those that are said to be loaded. The last frame is
    for comparing."""
    into, spare = frames[: len(ids)], frames[-1]
    wipe(into)
    loaded = tier.load(ids, into)
    for frame, block in zip(into[: loaded.num_blocks], ids, strict=False):
        assert holds(frame, block, spare), f"wrong bytes served for {block.key.hex()}"
    assert (loaded.reason is None) == (loaded.num_blocks == len(ids)), loaded
    return loaded


def io_error() -> Exception:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def disk_full() -> Exception:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def map_full() -> Exception:
    return MapFull("MDB_MAP_FULL")


class FaultyStorage(Storage):
    """Fails operations `first` to `first + count - 1`, counted from 1 over the named operations.

    With `first` 0 nothing fails. `arm` restarts the count. An empty `operations` means all.
    """

    def __init__(
        self,
        first: int = 0,
        *,
        count: int = 1,
        operations: Sequence[str] = (),
        error: Callable[[], Exception] = io_error,
    ) -> None:
        self._error = error
        self.seen: Counter[str] = Counter()
        self.num_failed = 0
        self.arm(first, count=count, operations=operations)

    def arm(self, first: int, *, count: int = 1, operations: Sequence[str] = ()) -> None:
        self._first = first
        self._end = first + count
        self._operations = frozenset(operations)
        self._number = 0

    def before(self, operation: str) -> None:
        self.seen[operation] += 1
        if self._operations and operation not in self._operations:
            return
        self._number += 1
        if self._first <= self._number < self._end and self._first:
            self.num_failed += 1
            raise self._error()


class LyingStorage(Storage):
    """Reads succeed but are wrong: `cut` bytes short, or with bit `flip` of a record changed."""

    def __init__(self) -> None:
        self.cut = 0
        self.flip: int | None = None

    def read(self, file: DataFile, into: memoryview, offset: int) -> int:
        count = super().read(file, into, offset)
        if self.flip is not None:
            into[PAGE_HEADER + self.flip // 8] ^= 1 << self.flip % 8
        return max(0, count - self.cut)


class KillingStorage(Storage):
    """Ends its own process, as `kill -9` would, the Nth time it reaches `point`."""

    def __init__(self, point: str, number: int) -> None:
        self._point = point
        self._left = number

    def before(self, operation: str) -> None:
        if operation == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
