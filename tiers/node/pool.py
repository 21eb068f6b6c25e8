"""The blocks of one layout as a node's clients use them, and their moves to and from the tier
below.

    absent ──reserve──► FILLING ──commit──► HELD ──evict──► absent        from clients
    absent ──lease────► LOADING ──loaded──► HELD                          from the tier below

Only the node's thread calls a pool, so it has no locks. The threads of its `Mover` read and write
the tier below. `residency` says which frame holds which block. A FILLING block belongs to one
client and is served to nobody. When that client leaves, the block is dropped.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.node.arena import SharedMemory
from tiers.node.below import PlaceJob
from tiers.node.block import NodeBlock, NodeBlockState
from tiers.node.capacity import Capacity
from tiers.node.messages import TIERS
from tiers.node.residency import NodeResidency
from tiers.telemetry.events import EventKind, EventStream
from tiers.tier import Cause, TierName
from tiers.transfer.mover import LoadJob, Mover, StoreJob

STORE_BLOCKS = 8  # blocks in one write to the tier below


@dataclass(slots=True)
class PoolCounts:
    """Counters that only grow, in blocks."""

    stored: int = 0
    collisions: int = 0
    overloaded: int = 0  # loads refused because the tier below's queue was full
    hits: Counter[TierName] = field(default_factory=Counter)

    def told(self) -> dict[str, int]:
        """As JSON, with the hits of each tier by its name."""
        return {
            **{f"{tier}_hits": self.hits[tier] for tier in TIERS},
            "stored": self.stored,
            "collisions": self.collisions,
            "overloaded": self.overloaded,
        }


@dataclass(slots=True, eq=False)
class Lease:
    """A run of blocks that a client asked for. `is_ready` once none of them is being loaded."""

    client: int
    blocks: list[NodeBlock]
    missing: int  # blocks asked for that follow these and are not held

    @property
    def is_ready(self) -> bool:
        return all(block.state is not NodeBlockState.LOADING for block in self.blocks)


@dataclass(slots=True, eq=False)
class NodeProbe:
    """The tier of each block in the leading run held. Blocks not in memory are probed below."""

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
    """The blocks of one layout. `mover` reaches the tier below; it is None if there is none."""

    memory: SharedMemory
    capacity: Capacity
    mover: Mover | None = None
    used: Callable[[Sequence[PrefixKey]], None] = lambda keys: None  # tells the tier below of hits
    wake: Callable[[], None] = lambda: None  # wakes the node's thread; any thread may call it
    closed: frozenset[PrefixKey] = frozenset()  # scopes being purged: not served, not kept
    stream: EventStream = field(default_factory=EventStream)
    counts: PoolCounts = field(default_factory=PoolCounts)
    residency: NodeResidency = field(init=False)
    _loads: list[tuple[LoadJob, list[NodeBlock]]] = field(default_factory=list)
    _stores: list[tuple[StoreJob, list[NodeBlock]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.residency = NodeResidency(
            self.memory, self.capacity, has_below=self.mover is not None, stream=self.stream
        )

    # Requests of clients.

    def probe(self, ids: Sequence[BlockId]) -> NodeProbe:
        """Find how many leading blocks are held, and where. Ready when the tier below has
        answered."""
        in_memory = len(list(self._run(ids)))
        rest = ids[in_memory:]
        if not rest or self._is_closed(rest) or self.mover is None:
            return NodeProbe(in_memory, None)
        if self.residency.find(rest[0].key) is not None:
            return NodeProbe(in_memory, None)
        job = PlaceJob(rest)
        return NodeProbe(in_memory, job if self.mover.submit(job) else None)

    def lease(self, ids: Sequence[BlockId], client: int) -> Lease:
        """Lease the leading run of these blocks. Blocks held only below are loaded first."""
        blocks = list(self._run(ids))
        for block in blocks:
            self.residency.take(block)
        self.counts.hits[TierName.HOST] += len(blocks)
        self.used([block.id.key for block in blocks])
        blocks += self._load(ids[len(blocks) :])
        return Lease(client, blocks, len(ids) - len(blocks))

    def settle(self, lease: Lease) -> list[int]:
        """The frames of a ready lease, for its leading run that is held. The other blocks are
        released."""
        held = 0
        while held < len(lease.blocks) and lease.blocks[held].state is NodeBlockState.HELD:
            held += 1
        for block in lease.blocks[held:]:
            self.residency.drop(block)
        return [block.frame for block in lease.blocks[:held]]

    def give_up(self, lease: Lease) -> None:
        """Drop a lease whose client left before it was ready."""
        for block in reversed(lease.blocks):
            self.residency.drop(block)

    def release(self, frames: Sequence[int]) -> None:
        """End the lease of these frames. The last block of a run becomes its coldest."""
        for frame in reversed(frames):
            self.residency.drop(self.residency.at(frame))

    def reserve(self, ids: Sequence[BlockId], client: int) -> list[tuple[int, int]]:
        """Reserve frames for the blocks not in memory yet. Returns (position, frame) for each."""
        pairs: list[tuple[int, int]] = []
        if self._is_closed(ids):
            return pairs
        for position, block_id in enumerate(ids):
            standing = self.residency.find(block_id.key)
            if standing is not None:
                self.counts.collisions += standing.id != block_id
                continue
            frame = self.residency.take_frame(block_id.scope)
            if frame is None:
                break
            self.residency.add(NodeBlock(block_id, frame, NodeBlockState.FILLING, client))
            pairs.append((position, frame))
        return pairs

    def commit(self, frames: Sequence[int]) -> None:
        """Serve frames that the client has written, from now on, and write them below."""
        blocks = [self.residency.at(frame) for frame in frames]
        for block in blocks:
            block.state = NodeBlockState.HELD
            if not block.detached:
                self.residency.tell(EventKind.STORED, block)
        for block in reversed(blocks):
            self.residency.rest(block)
        for block in blocks:
            self.write(block)
        self.counts.stored += len(frames)
        self.work()

    def abandon(self, frames: Sequence[int]) -> None:
        """Drop unfinished blocks whose writer has left."""
        for frame in frames:
            self.residency.forget(self.residency.at(frame))

    # Results from the threads of the tier below.

    def work(self) -> None:
        """Process finished loads and writes, and start the next writes."""
        for load in _take_done(self._loads):
            self._loaded(*load)
        for store in _take_done(self._stores):
            self._stored(*store)
        self._write()

    def write(self, block: NodeBlock) -> bool:
        """Queue the block to be written below. Returns whether it has to be."""
        if self.mover is None or block.is_below or block.detached:
            return False
        self.residency.unwritten[block.key] = block
        return True

    def is_unwritten(self, key: PrefixKey) -> bool:
        """Whether the block is in memory and not yet below."""
        block = self.residency.find(key)
        return block is not None and not block.is_below

    @property
    def is_writing(self) -> bool:
        """Whether any block is still waiting for its write below or being written."""
        return bool(self.residency.unwritten or self._stores)

    # Requests of operators.

    def evict_keys(self, keys: Sequence[PrefixKey]) -> int:
        """Drop those of these blocks that are unused and not pinned. Returns how many."""
        found = [self.residency.ready(key) for key in keys]
        idle = [b for b in found if b is not None and not b.leases and not b.pinned]
        for block in idle:
            self.residency.tell(EventKind.REMOVED, block, cause=Cause.REQUEST)
            self.residency.remove(block)
        return len(idle)

    def purge(self, roots: frozenset[PrefixKey]) -> tuple[int, int]:
        """Remove every block of these scopes from memory.

        Returns how many, and how many of them are in use. Those are freed when their last user
        releases them.
        """
        blocks = self.residency.of_scopes(roots)
        for block in blocks:
            self.residency.detach(block)
        return len(blocks), sum(map(self.residency.holds, blocks))

    def count(self, roots: frozenset[PrefixKey]) -> int:
        """The number of blocks of these scopes that can be found."""
        return len(self.residency.of_scopes(roots))

    # Internals.

    def _run(self, ids: Sequence[BlockId]) -> Iterator[NodeBlock]:
        """The leading blocks that memory can serve. The identity of each is compared."""
        for block_id in ids:
            block = self.residency.find(block_id.key)
            if block is None or block.state is not NodeBlockState.HELD:
                return
            if block.id != block_id:
                self.counts.collisions += 1
                return
            yield block

    def _load(self, ids: Sequence[BlockId]) -> list[NodeBlock]:
        """Start loading these blocks from the tier below. Blocks already being loaded are
        included."""
        rising: list[NodeBlock] = []
        while len(rising) < len(ids):
            block = self.residency.find(ids[len(rising)].key)
            if (
                block is None
                or block.state is NodeBlockState.FILLING
                or block.id != ids[len(rising)]
            ):
                break
            self.residency.take(block)
            rising.append(block)
        rest = [each for each in ids[len(rising) :] if self.residency.find(each.key) is None]
        if (
            self.mover is None
            or self._is_closed(rest)
            or len(rest) != len(ids) - len(rising)
            or not rest
        ):
            return rising
        fresh: list[NodeBlock] = []
        for block_id in rest:
            frame = self.residency.take_frame(block_id.scope)
            if frame is None:
                break
            fresh.append(
                self.residency.add(NodeBlock(block_id, frame, NodeBlockState.LOADING, leases=1))
            )
        job = LoadJob([b.id for b in fresh], [self.memory.frame(b.frame) for b in fresh])
        if not fresh or not self.mover.submit(job):
            self.counts.overloaded += bool(fresh)
            for block in fresh:
                self.residency.forget(block)
            return rising
        self._loads.append((job, fresh))
        return rising + fresh

    def _loaded(self, job: LoadJob, blocks: list[NodeBlock]) -> None:
        num_loaded = job.loaded.num_blocks
        assert self.mover is not None
        below = self.mover.below
        sources = job.loaded.sources or (below,) * num_loaded
        self.counts.hits.update(sources)
        for block, source in zip(blocks[:num_loaded], sources, strict=True):
            block.state, block.is_below = NodeBlockState.HELD, source is below
            if not block.detached:
                self.residency.tell(EventKind.MOVED, block, source=source)
            if not block.is_below:  # so that the next hit comes from the tier below
                self.write(block)
        for block in reversed(blocks[:num_loaded]):
            self.residency.rest(block)
        for block in blocks[num_loaded:]:
            self.residency.forget(block)

    def _write(self) -> None:
        while self.residency.unwritten and self.mover is not None and self.mover.store_room:
            unwritten = self.residency.unwritten
            size = min(STORE_BLOCKS, len(unwritten))
            batch = [unwritten.popitem(last=False)[1] for _ in range(size)]
            frames = [self.memory.frame(block.frame) for block in batch]
            job = StoreJob([block.id for block in batch], frames)
            for block in batch:
                self.residency.take(block)
            if not self.mover.submit(job):
                self._stored(job, batch)
                return
            self._stores.append((job, batch))

    def _stored(self, job: StoreJob, blocks: list[NodeBlock]) -> None:
        written = job.done and not job.failed
        for block in reversed(blocks):
            block.is_below = written
            self.residency.drop(block)
        for key in job.dropped:
            dropped = self.residency.find(key)
            if dropped is not None:
                dropped.is_below = False
                self.residency.relist(dropped)

    def _is_closed(self, ids: Sequence[BlockId]) -> bool:
        return bool(ids and self.closed) and ids[0].scope in self.closed


J = TypeVar("J", LoadJob, StoreJob)


def _take_done(jobs: list[tuple[J, list[NodeBlock]]]) -> list[tuple[J, list[NodeBlock]]]:
    """Remove and return the jobs that are done. Each is checked once, since one may end
    meanwhile."""
    done: list[tuple[J, list[NodeBlock]]] = []
    waiting: list[tuple[J, list[NodeBlock]]] = []
    for entry in jobs:
        (done if entry[0].done else waiting).append(entry)
    jobs[:] = waiting
    return done
