"""The blocks of one layout in a node: which frame holds which block, who uses it, and what leaves.

    absent ──reserve──► FILLING ──commit──► HELD ──evict──► absent        by clients
    absent ──lease────► LOADING ──loaded──► HELD                          from the tier below

Only the node's thread calls a pool, so it has no locks. The tier below is read and written on the
threads of its `Mover`. Invariants, checked by `Pool.check`:

1. Every frame in use is one block's. `Capacity.used_bytes` is what all pools' frames take.
2. A block is evictable exactly while it is HELD and nobody leases it.
3. A FILLING block belongs to one client and is served to nobody; when its client goes, it goes.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.node.arena import SharedMemory
from tiers.node.below import PlaceJob
from tiers.tier import TierName
from tiers.transfer.mover import LoadJob, Mover, StoreJob

STORE_BLOCKS = 8  # blocks of one write to the tier below
LOOK_FOR_CLEAN = 64  # coldest blocks among which one that is held below is preferred


class NodeBlockState(Enum):
    """How far a block is."""

    FILLING = auto()  # a client writes it
    LOADING = auto()  # it comes from the tier below
    HELD = auto()


@dataclass(slots=True, eq=False)
class NodeBlock:
    """One block and its frame. `leases` counts clients and writes that use the frame."""

    id: BlockId
    frame: int
    state: NodeBlockState
    client: int = 0  # who fills it
    leases: int = 0
    is_below: bool = False
    tick: int = 0  # when it was last used, against all blocks of the node
    pinned: bool = False
    detached: bool = False  # found by nobody any more; it goes with who uses it

    @property
    def key(self) -> PrefixKey:
        return self.id.key

    @property
    def held_below(self) -> bool:
        return self.is_below


@dataclass(slots=True)
class PoolCounts:
    """Counters that only grow, in blocks."""

    host_hits: int = 0
    disk_hits: int = 0
    remote_hits: int = 0
    stored: int = 0
    evicted: int = 0
    lost: int = 0  # evicted before the tier below had them
    collisions: int = 0
    overloaded: int = 0  # loads that the tier below had no room to queue


class Capacity:
    """The bytes that all pools of a node share, and the order in which they use them."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.pools: list[Pool] = []
        self._tick = 0

    def next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def make_room(self, num_bytes: int, pool: "Pool") -> bool:
        """Evict the coldest blocks of any pool until `num_bytes` fit; False when they cannot."""
        while self.used_bytes + num_bytes > self.capacity_bytes:
            candidates = [each for each in self.pools if each.num_evictable]
            if not candidates:
                return False
            coldest = min(candidates, key=Pool.coldest_tick)
            coldest.evict(keeps_memory=coldest is pool)
        return True


@dataclass(slots=True, eq=False)
class Lease:
    """A run of blocks that a client asked for; `is_ready` once none of them is being loaded."""

    client: int
    blocks: list[NodeBlock]
    missing: int  # blocks asked for beyond these

    @property
    def is_ready(self) -> bool:
        return all(block.state is not NodeBlockState.LOADING for block in self.blocks)


@dataclass(slots=True, eq=False)
class NodeProbe:
    """The tier of each block of the leading run held; the rest is looked for below."""

    in_memory: int
    job: PlaceJob | None

    @property
    def is_ready(self) -> bool:
        return self.job is None or self.job.done

    @property
    def tiers(self) -> list[TierName]:
        below = self.job.tiers if self.job is not None else ()
        return [TierName.HOST] * self.in_memory + list(below)


@dataclass(slots=True, eq=False)
class Pool:
    """The blocks of one layout. `mover` reaches the tier below; None where there is none."""

    memory: SharedMemory
    capacity: Capacity
    mover: Mover | None = None
    used: Callable[[Sequence[PrefixKey]], None] = lambda keys: None  # hits, for the tier below
    wake: Callable[[], None] = lambda: None  # the node's thread, from any other
    pinned_keys: Container[PrefixKey] = ()
    closed: frozenset[PrefixKey] = frozenset()  # scopes that are purged: nothing is served or kept
    counts: PoolCounts = field(default_factory=PoolCounts)
    _blocks: dict[PrefixKey, NodeBlock] = field(default_factory=dict)
    _by_frame: dict[int, NodeBlock] = field(default_factory=dict)
    _evictable: "OrderedDict[PrefixKey, NodeBlock]" = field(default_factory=OrderedDict)
    _pinned: "OrderedDict[PrefixKey, NodeBlock]" = field(default_factory=OrderedDict)  # and clean
    _unwritten: "OrderedDict[PrefixKey, NodeBlock]" = field(default_factory=OrderedDict)
    _free: list[int] = field(default_factory=list)
    _fresh: int = 0  # frames from here on were never used
    _loads: list[tuple[LoadJob, list[NodeBlock]]] = field(default_factory=list)
    _stores: list[tuple[StoreJob, list[NodeBlock]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.capacity.pools.append(self)

    # What clients ask.

    def probe(self, ids: Sequence[BlockId]) -> NodeProbe:
        """How many leading blocks are held, and where. Ready when the tier below has answered."""
        in_memory = len(list(self._run(ids)))
        rest = ids[in_memory:]
        if not rest or self._is_closed(rest) or self.mover is None or rest[0].key in self._blocks:
            return NodeProbe(in_memory, None)
        job = PlaceJob(rest)
        return NodeProbe(in_memory, job if self.mover.submit(job) else None)

    def lease(self, ids: Sequence[BlockId], client: int) -> Lease:
        """Use the leading run of these blocks; what is held below is loaded first."""
        blocks = list(self._run(ids))
        for block in blocks:
            self._take(block)
        self.counts.host_hits += len(blocks)
        self.used([block.id.key for block in blocks])
        blocks += self._load(ids[len(blocks) :])
        return Lease(client, blocks, len(ids) - len(blocks))

    def settle(self, lease: Lease) -> list[int]:
        """The frames of a lease that is ready: of its leading run that is held."""
        held = 0
        while held < len(lease.blocks) and lease.blocks[held].state is NodeBlockState.HELD:
            held += 1
        for block in lease.blocks[held:]:
            self._drop(block)
        return [block.frame for block in lease.blocks[:held]]

    def give_up(self, lease: Lease) -> None:
        """Whoever asked for these has gone before they were ready."""
        for block in reversed(lease.blocks):
            self._drop(block)

    def release(self, frames: Sequence[int]) -> None:
        """Stop using leased frames. The last of a run becomes the coldest of it."""
        for frame in reversed(frames):
            self._drop(self._by_frame[frame])

    def reserve(self, ids: Sequence[BlockId], client: int) -> list[tuple[int, int]]:
        """(position, frame) of the blocks that the client is to write: those not here already."""
        pairs: list[tuple[int, int]] = []
        if self._is_closed(ids):
            return pairs
        for position, block_id in enumerate(ids):
            standing = self._blocks.get(block_id.key)
            if standing is not None:
                self.counts.collisions += standing.id != block_id
                continue
            frame = self._take_frame()
            if frame is None:
                break
            self._add(NodeBlock(block_id, frame, NodeBlockState.FILLING, client))
            pairs.append((position, frame))
        return pairs

    def commit(self, frames: Sequence[int]) -> None:
        """The client has written these: serve them from now on, and write them below."""
        for frame in reversed(frames):
            block = self._by_frame[frame]
            block.state = NodeBlockState.HELD
            self._rest(block)
        for block in [self._by_frame[frame] for frame in frames if frame in self._by_frame]:
            self.write(block)
        self.counts.stored += len(frames)
        self.work()

    def abandon(self, frames: Sequence[int]) -> None:
        """Their writer has gone: forget blocks that nobody finished."""
        for frame in frames:
            self._forget(self._by_frame[frame])

    # What the threads of the tier below have done.

    def work(self) -> None:
        """Take in finished loads and writes, and start the next writes."""
        for load in _take_done(self._loads):
            self._loaded(*load)
        for store in _take_done(self._stores):
            self._stored(*store)
        self._write()

    def write(self, block: NodeBlock) -> bool:
        """See that the block is written below; whether it has to be."""
        if self.mover is None or block.is_below or block.detached:
            return False
        self._unwritten[block.key] = block
        return True

    def is_unwritten(self, key: PrefixKey) -> bool:
        """The block is in memory, and not below yet."""
        block = self._blocks.get(key)
        return block is not None and not block.is_below

    @property
    def is_writing(self) -> bool:
        """Something is still on its way down."""
        return bool(self._unwritten or self._stores)

    # What operators ask.

    def ready(self, key: PrefixKey) -> NodeBlock | None:
        block = self._blocks.get(key)
        return block if block is not None and block.state is NodeBlockState.HELD else None

    def pin(self, block: NodeBlock) -> None:
        """From now on the block leaves after all others, and only to the tier below."""
        block.pinned = True
        self._settle_down(block)

    def unpin(self, block: NodeBlock) -> None:
        block.pinned = False
        self._settle_down(block)

    def evict_keys(self, keys: Sequence[PrefixKey]) -> int:
        """Drop those of these blocks that nobody uses and no pin has; how many."""
        found = [self.ready(key) for key in keys]
        idle = [b for b in found if b is not None and not b.leases and not b.pinned]
        for block in idle:
            self._forget(block)
            self.memory.give_back(block.frame)
        return len(idle)

    def purge(self, roots: frozenset[PrefixKey]) -> tuple[int, int]:
        """Take every block of these scopes out of memory: how many, and how many are in use, which
        go with who uses them."""
        blocks = [block for block in self._blocks.values() if block.id.scope in roots]
        for block in blocks:
            self._detach(block)
        return len(blocks), sum(block.frame in self._by_frame for block in blocks)

    def count(self, roots: frozenset[PrefixKey]) -> int:
        """Blocks of these scopes that can be found."""
        return sum(block.id.scope in roots for block in list(self._blocks.values()))

    # Room.

    @property
    def num_blocks(self) -> int:
        return len(self._by_frame)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable) + len(self._pinned)

    def coldest_tick(self) -> int:
        return next(iter((self._evictable or self._pinned).values())).tick

    def evict(self, *, keeps_memory: bool) -> None:
        """Drop the coldest block; one that is held below goes before one that would be lost."""
        block = self._victim()
        self.counts.evicted += 1
        self.counts.lost += self.mover is not None and not block.is_below
        self._forget(block)
        if not keeps_memory:
            self.memory.give_back(block.frame)

    def check(self) -> None:
        """Assert the invariants above."""
        frames = set(self._by_frame)
        assert all(block.frame == frame for frame, block in self._by_frame.items())
        assert len(self._blocks) == sum(not block.detached for block in self._by_frame.values())
        assert frames.isdisjoint(self._free)
        assert len(frames) + len(self._free) == self._fresh
        for key, block in self._blocks.items():
            idle = block.state is NodeBlockState.HELD and not block.leases
            assert (idle and not block.pinned) == (key in self._evictable), block
            assert (idle and block.pinned and block.is_below) == (key in self._pinned), block
            assert block.leases == 0 or block.state is not NodeBlockState.FILLING, block
        used = sum(pool.num_blocks * pool.memory.stride for pool in self.capacity.pools)
        assert used == self.capacity.used_bytes <= self.capacity.capacity_bytes

    # Below, how it is done.

    def _run(self, ids: Sequence[BlockId]) -> Iterator[NodeBlock]:
        """The leading blocks that are served from memory, each proven by its identity."""
        for block_id in ids:
            block = self._blocks.get(block_id.key)
            if block is None or block.state is not NodeBlockState.HELD:
                return
            if block.id != block_id:
                self.counts.collisions += 1
                return
            yield block

    def _load(self, ids: Sequence[BlockId]) -> list[NodeBlock]:
        """Blocks that rise from the tier below, or rise already."""
        rising: list[NodeBlock] = []
        while len(rising) < len(ids):
            block = self._blocks.get(ids[len(rising)].key)
            if (
                block is None
                or block.state is NodeBlockState.FILLING
                or block.id != ids[len(rising)]
            ):
                break
            self._take(block)
            rising.append(block)
        rest = [each for each in ids[len(rising) :] if each.key not in self._blocks]
        if (
            self.mover is None
            or self._is_closed(rest)
            or len(rest) != len(ids) - len(rising)
            or not rest
        ):
            return rising
        fresh: list[NodeBlock] = []
        for block_id in rest:
            frame = self._take_frame()
            if frame is None:
                break
            fresh.append(self._add(NodeBlock(block_id, frame, NodeBlockState.LOADING, leases=1)))
        job = LoadJob([b.id for b in fresh], [self.memory.frame(b.frame) for b in fresh])
        if not fresh or not self.mover.submit(job):
            self.counts.overloaded += bool(fresh)
            for block in fresh:
                self._forget(block)
            return rising
        self._loads.append((job, fresh))
        return rising + fresh

    def _loaded(self, job: LoadJob, blocks: list[NodeBlock]) -> None:
        num_loaded = job.loaded.num_blocks
        sources = job.loaded.sources or (TierName.DISK,) * num_loaded
        num_remote = sources.count(TierName.REMOTE)
        self.counts.disk_hits += num_loaded - num_remote
        self.counts.remote_hits += num_remote
        for block, source in zip(blocks[:num_loaded], sources, strict=True):
            block.state, block.is_below = NodeBlockState.HELD, source is TierName.DISK
            if not block.is_below:  # the next hit comes from this machine's disk
                self.write(block)
        for block in reversed(blocks[:num_loaded]):
            self._rest(block)
        for block in blocks[num_loaded:]:
            self._forget(block)

    def _write(self) -> None:
        while self._unwritten and self.mover is not None and self.mover.store_room:
            batch = [self._unwritten.popitem(last=False)[1] for _ in range(self._batch_size)]
            frames = [self.memory.frame(block.frame) for block in batch]
            job = StoreJob([block.id for block in batch], frames)
            for block in batch:
                self._take(block)
            if not self.mover.submit(job):
                self._stored(job, batch)
                return
            self._stores.append((job, batch))

    @property
    def _batch_size(self) -> int:
        return min(STORE_BLOCKS, len(self._unwritten))

    def _stored(self, job: StoreJob, blocks: list[NodeBlock]) -> None:
        written = job.done and not job.failed
        for block in reversed(blocks):
            block.is_below = written
            self._drop(block)
        for key in job.dropped:
            dropped = self._blocks.get(key)
            if dropped is not None:
                dropped.is_below = False
                self._settle_down(dropped)

    def _victim(self) -> NodeBlock:
        coldest = self._evictable or self._pinned
        for number, block in enumerate(coldest.values()):
            if block.is_below or self.mover is None:
                return block
            if number == LOOK_FOR_CLEAN:
                break
        return next(iter(coldest.values()))

    def _take_frame(self) -> int | None:
        stride = self.memory.stride
        if not self.capacity.make_room(stride, self):
            return None
        if self._free:
            frame = self._free.pop()
        elif self._fresh < self.memory.num_frames:
            frame, self._fresh = self._fresh, self._fresh + 1
        else:
            return None
        self.capacity.used_bytes += stride
        return frame

    def _add(self, block: NodeBlock) -> NodeBlock:
        self._blocks[block.id.key] = self._by_frame[block.frame] = block
        return block

    def _take(self, block: NodeBlock) -> None:
        block.leases += 1
        self._settle_down(block)

    def _is_closed(self, ids: Sequence[BlockId]) -> bool:
        return bool(ids and self.closed) and ids[0].scope in self.closed

    def _detach(self, block: NodeBlock) -> None:
        """Let nobody find the block; its frame is free once nobody uses it."""
        if block.leases == 0 and block.state is NodeBlockState.HELD:
            self._forget(block)
            self.memory.give_back(block.frame)
            return
        block.detached = True
        for table in (self._blocks, self._evictable, self._pinned, self._unwritten):
            table.pop(block.key, None)

    def _drop(self, block: NodeBlock) -> None:
        if self._by_frame.get(block.frame) is not block:
            return  # it was being loaded, and the load failed
        block.leases -= 1
        self._rest(block)

    def _rest(self, block: NodeBlock) -> None:
        """Becomes the hottest of the evictable blocks, if nobody uses it."""
        if block.leases or block.state is not NodeBlockState.HELD:
            return
        if block.detached:
            self._forget(block)
            return
        block.tick = self.capacity.next_tick()
        if block.key in self.pinned_keys:
            block.pinned = True
        for table in (self._evictable, self._pinned):
            table.pop(block.key, None)
        self._settle_down(block)

    def _settle_down(self, block: NodeBlock) -> None:
        """List the block where it may leave from, if it may."""
        idle = block.state is NodeBlockState.HELD and not block.leases and not block.detached
        for table, belongs in (
            (self._evictable, idle and not block.pinned),
            (self._pinned, idle and block.pinned and block.is_below),
        ):
            if not belongs:
                table.pop(block.key, None)
            elif block.key not in table:
                table[block.key] = block

    def _forget(self, block: NodeBlock) -> None:
        if not block.detached:
            for table in (self._blocks, self._evictable, self._pinned, self._unwritten):
                table.pop(block.key, None)
        del self._by_frame[block.frame]
        self._free.append(block.frame)
        self.capacity.used_bytes -= self.memory.stride
        block.state = NodeBlockState.FILLING  # whoever still looks at it is not served


J = TypeVar("J", LoadJob, StoreJob)


def _take_done(jobs: list[tuple[J, list[NodeBlock]]]) -> list[tuple[J, list[NodeBlock]]]:
    """Remove the jobs that are done. Each is looked at once, for one may end meanwhile."""
    done: list[tuple[J, list[NodeBlock]]] = []
    waiting: list[tuple[J, list[NodeBlock]]] = []
    for entry in jobs:
        (done if entry[0].done else waiting).append(entry)
    jobs[:] = waiting
    return done
