"""Estimates how much cache would help: the miss-ratio curve of live traffic, in bounded memory.

The method is SHARDS with a fixed number of samples (Waldspurger et al., "Efficient MRC Construction
with SHARDS", FAST 2015, section 4.2). A block is followed while a hash of its key is below a
threshold. When more than `max_samples` are followed, the threshold falls to the highest hash, that
block is dropped, and the counts shrink by the ratio of the rates. The distance of a reuse among the
followed blocks, divided by the rate, estimates the stack distance in the whole stream. All uses of
a very hot block, such as one of a system prompt, are followed or none are. The surplus or shortage
of uses against the rate is therefore counted at the shortest distance (SHARDS-adj, section 3.4).
Engine thread only. `curve` is cheap enough for its stats.
"""

import heapq
import math
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from tiers.blocks.keys import KEY_BYTES, PrefixKey
from tiers.tier import Sample, TierName

_HASH_SPACE = 1 << 32
_POINTS_PER_OCTAVE = 8  # a curve's capacities are 9 % apart


@dataclass(frozen=True, slots=True)
class MissRatioCurve:
    """`hit_rates[i]` is the share of uses that an LRU of `capacities[i]` blocks would have hit."""

    capacities: tuple[int, ...]
    hit_rates: tuple[float, ...]
    working_set_blocks: int  # distinct blocks seen, estimated

    def hit_rate(self, capacity_blocks: int) -> float:
        """The rate at the curve's largest capacity that is not above `capacity_blocks`."""
        index = bisect_right(self.capacities, capacity_blocks)
        return self.hit_rates[index - 1] if index else 0.0


class WorkingSet:
    """The curve of all uses so far. A use that is not followed costs one hash (0.3 us). A followed
    use costs O(log max_samples). Memory: about 300 bytes for each of `max_samples`."""

    def __init__(self, max_samples: int = 4096) -> None:
        self._max_samples = max_samples
        self._threshold = _HASH_SPACE
        self._slots: dict[Hashable, int] = {}  # followed key -> time slot of its last use
        self._by_hash: list[tuple[int, int, Hashable]] = []  # max-heap of (-hash, serial, key)
        self._serial = 0
        self._tree = _Fenwick(4 * max_samples)
        self._next_slot = 0
        self._reuses: dict[int, float] = {}  # point of the curve -> reuses at that distance
        self.num_uses = 0  # all of them
        self._num_followed = 0.0  # at the current rate
        self._num_distinct = 0.0

    @property
    def rate(self) -> float:
        return self._threshold / _HASH_SPACE

    def use(self, key: Hashable) -> None:
        """Count a use of a block, hit or not. Bytes and integers hash alike in every process."""
        self.num_uses += 1
        self._follow(key, _hash(key))

    def use_all(self, keys: Sequence[bytes]) -> None:
        """The same for keys that are hashes themselves: 0.05 us for one not followed."""
        self.num_uses += len(keys)
        hashes = np.frombuffer(b"".join(keys), "<u4")[::4]
        for number in np.flatnonzero(hashes < self._threshold).tolist():
            self._follow(keys[number], int(hashes[number]))

    def remember(self, sample: Sample) -> None:
        """Add blocks that were used before this object began, most recent last."""
        assert not self.num_uses, "what is remembered comes before what is used"
        self._threshold = min(self._threshold, sample.bound)
        for key in sample.keys:
            self.made(key)

    def made(self, key: Hashable) -> None:
        """Add a block that was generated, not asked for. Its next use is a reuse."""
        hashed = _hash(key)
        if hashed < self._threshold:
            self._see(key, hashed)

    def _follow(self, key: Hashable, hashed: int) -> None:
        if hashed >= self._threshold:
            return
        self._num_followed += 1
        slot = self._slots.get(key)
        if slot is not None:
            newer = len(self._slots) - self._tree.count_through(slot)
            point = _point((newer + 1) / self.rate)
            self._reuses[point] = self._reuses.get(point, 0.0) + 1
        self._see(key, hashed)

    def _see(self, key: Hashable, hashed: int) -> None:
        """Make `key` the most recent of the followed blocks."""
        slot = self._slots.get(key)
        if slot is None:
            self._num_distinct += 1
            self._serial += 1
            heapq.heappush(self._by_hash, (-hashed, self._serial, key))
        else:
            self._tree.add(slot, -1)
        self._stamp(key)
        if len(self._slots) > self._max_samples:
            self._lower_threshold()

    def curve(self) -> MissRatioCurve:
        """The curve so far. Empty before the first reuse."""
        capacities, rates = [], []
        expected = self.num_uses * self.rate
        hits = expected - self._num_followed
        for point in sorted(self._reuses):
            hits += self._reuses[point]
            capacities.append(math.ceil(2 ** (point / _POINTS_PER_OCTAVE)))
            rates.append(min(1.0, max(0.0, hits / expected)))
        working_set = round(self._num_distinct / self.rate)
        return MissRatioCurve(tuple(capacities), tuple(rates), working_set)

    def _stamp(self, key: Hashable) -> None:
        """Give `key` the newest time slot. When slots run out, renumber the live ones."""
        if self._next_slot == self._tree.size:
            order = sorted(self._slots, key=self._slots.__getitem__)
            self._tree = _Fenwick(self._tree.size)
            self._next_slot = 0
            for other in order:
                if other != key:
                    self._place(other)
        self._place(key)

    def _place(self, key: Hashable) -> None:
        self._slots[key] = self._next_slot
        self._tree.add(self._next_slot, 1)
        self._next_slot += 1

    def _lower_threshold(self) -> None:
        """Drop the block with the highest hash and count at the lower rate from now on."""
        negative, _, key = heapq.heappop(self._by_hash)
        self._tree.add(self._slots.pop(key), -1)
        shrink = -negative / self._threshold
        self._threshold = -negative
        self._num_followed *= shrink
        self._num_distinct *= shrink
        for point in self._reuses:
            self._reuses[point] *= shrink


class _Fenwick:
    """Prefix sums over `size` slots, in O(log size) each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._tree = [0] * (size + 1)

    def add(self, slot: int, amount: int) -> None:
        index = slot + 1
        while index <= self.size:
            self._tree[index] += amount
            index += index & -index

    def count_through(self, slot: int) -> int:
        index, total = slot + 1, 0
        while index:
            total += self._tree[index]
            index &= index - 1
        return total


def _hash(key: Hashable) -> int:
    if isinstance(key, bytes):
        return int.from_bytes(key[:4], "little") if len(key) == KEY_BYTES else zlib.crc32(key)
    return zlib.crc32(str(key).encode())


def _point(distance: float) -> int:
    """The point of the curve with the smallest capacity that holds `distance` blocks."""
    return math.ceil(math.log2(distance) * _POINTS_PER_OCTAVE)


MAX_WAITING = 1024  # lookups; a step rarely has more than a few


@dataclass(frozen=True, slots=True)
class TierPoint:
    """A tier and all above it as one cache: its size, and an LRU's hit rate at it."""

    tier: TierName
    capacity_blocks: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """The curve of hit rate by capacity, and where on it the tiers are."""

    curve: MissRatioCurve
    tiers: tuple[TierPoint, ...]
    num_uses: int  # blocks asked for
    num_dropped: int  # lookups that were not followed
    sampled: float  # share of blocks that is followed
    block_tokens: int
    block_bytes: int


class Traffic:
    """Feeds a `WorkingSet` from lookups and from generated blocks."""

    def __init__(self, max_samples: int = 4096) -> None:
        self._working_set = WorkingSet(max_samples)
        self._max_samples = max_samples
        self._waiting: deque[list[PrefixKey]] = deque()
        self._memory: Future[Sample] | None = None  # earlier uses, while they are read
        self.num_dropped = 0

    def begin(self, ask: Callable[[int], "Future[Sample]"]) -> None:
        """Begin from the blocks present at the start, so that using one is not a first use. `ask`
        requests a sample of at most the given number."""
        self._memory = ask(self._max_samples)

    def asked(self, keys: list[PrefixKey]) -> None:
        """Queue the keys that a request looked up."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(keys[:])
        else:
            self.num_dropped += 1

    def made(self, key: PrefixKey) -> None:
        """Add a generated block. A later request can find it, though none has asked for it yet."""
        if self._recalled():
            self._working_set.made(key)

    def step(self) -> None:
        """Follow the lookups since the last step."""
        while self._waiting and self._recalled():
            self._working_set.use_all(self._waiting.popleft())

    def _recalled(self) -> bool:
        """Whether the earlier uses are known, or there is nothing to wait for."""
        if self._memory is not None and self._memory.done():
            if self._memory.exception() is None:
                self._working_set.remember(self._memory.result())
            self._memory = None
        return self._memory is None

    def report(
        self, capacities: Mapping[TierName, int], *, block_tokens: int, block_bytes: int
    ) -> TrafficReport:
        """`capacities`: blocks of each tier, hottest first."""
        self.step()
        curve = self._working_set.curve()
        points, total = [], 0
        for tier, blocks in capacities.items():
            total += blocks
            points.append(TierPoint(tier, total, curve.hit_rate(total)))
        return TrafficReport(
            curve=curve,
            tiers=tuple(points),
            num_uses=self._working_set.num_uses,
            num_dropped=self.num_dropped,
            sampled=self._working_set.rate,
            block_tokens=block_tokens,
            block_bytes=block_bytes,
        )
