"""The blocks of one layout as a node's clients use them, and their way to and from the tier below.

    absent ──reserve──► FILLING ──commit──► HELD ──evict──► absent        by clients
    absent ──lease────► LOADING ──loaded──► HELD                          from the tier below

Only the node's thread calls a pool, so it has no locks. The tier below is read and written on the
threads of its `Mover`. `residency` says which frame holds which block. A FILLING block belongs to
one client and is served to nobody; when its client goes, it goes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.node.arena import SharedMemory
from tiers.node.below import PlaceJob
from tiers.node.block import NodeBlock, NodeBlockState
from tiers.node.capacity import Capacity
from tiers.node.residency import NodeResidency
from tiers.telemetry.events import EventKind, EventStream
from tiers.tier import Cause, TierName
from tiers.transfer.mover import LoadJob, Mover, StoreJob

STORE_BLOCKS = 8  # blocks of one write to the tier below


@dataclass(slots=True)
class PoolCounts:
    """Counters that only grow, in blocks."""

    host_hits: int = 0
    disk_hits: int = 0
    remote_hits: int = 0
    stored: int = 0
    collisions: int = 0
    overloaded: int = 0  # loads that the tier below had no room to queue


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
    closed: frozenset[PrefixKey] = frozenset()  # scopes that are purged: nothing is served or kept
    stream: EventStream = field(default_factory=EventStream)
    counts: PoolCounts = field(default_factory=PoolCounts)
    residency: NodeResidency = field(init=False)
    _loads: list[tuple[LoadJob, list[NodeBlock]]] = field(default_factory=list)
    _stores: list[tuple[StoreJob, list[NodeBlock]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.residency = NodeResidency(
            self.memory, self.capacity, has_below=self.mover is not None, stream=self.stream
        )

    # What clients ask.

    def probe(self, ids: Sequence[BlockId]) -> NodeProbe:
        """How many leading blocks are held, and where. Ready when the tier below has answered."""
        in_memory = len(list(self._run(ids)))
        rest = ids[in_memory:]
        if not rest or self._is_closed(rest) or self.mover is None:
            return NodeProbe(in_memory, None)
        if self.residency.find(rest[0].key) is not None:
            return NodeProbe(in_memory, None)
        job = PlaceJob(rest)
        return NodeProbe(in_memory, job if self.mover.submit(job) else None)

    def lease(self, ids: Sequence[BlockId], client: int) -> Lease:
        """Use the leading run of these blocks; what is held below is loaded first."""
        blocks = list(self._run(ids))
        for block in blocks:
            self.residency.take(block)
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
            self.residency.drop(block)
        return [block.frame for block in lease.blocks[:held]]

    def give_up(self, lease: Lease) -> None:
        """The client left before these were ready."""
        for block in reversed(lease.blocks):
            self.residency.drop(block)

    def release(self, frames: Sequence[int]) -> None:
        """Stop using leased frames. The last of a run becomes the coldest of it."""
        for frame in reversed(frames):
            self.residency.drop(self.residency.at(frame))

    def reserve(self, ids: Sequence[BlockId], client: int) -> list[tuple[int, int]]:
        """(position, frame) of the blocks that the client is to write: those not here already."""
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
        """The client has written these: serve them from now on, and write them below."""
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
        """Their writer has gone: forget blocks that nobody finished."""
        for frame in frames:
            self.residency.forget(self.residency.at(frame))

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
        self.residency.unwritten[block.key] = block
        return True

    def is_unwritten(self, key: PrefixKey) -> bool:
        """The block is in memory, and not below yet."""
        block = self.residency.find(key)
        return block is not None and not block.is_below

    @property
    def is_writing(self) -> bool:
        """Something is still on its way down."""
        return bool(self.residency.unwritten or self._stores)

    # What operators ask.

    def evict_keys(self, keys: Sequence[PrefixKey]) -> int:
        """Drop those of these blocks that nobody uses and no pin has; how many."""
        found = [self.residency.ready(key) for key in keys]
        idle = [b for b in found if b is not None and not b.leases and not b.pinned]
        for block in idle:
            self.residency.tell(EventKind.REMOVED, block, cause=Cause.REQUEST)
            self.residency.remove(block)
        return len(idle)

    def purge(self, roots: frozenset[PrefixKey]) -> tuple[int, int]:
        """Take every block of these scopes out of memory: how many, and how many are in use, which
        go with who uses them."""
        blocks = self.residency.of_scopes(roots)
        for block in blocks:
            self.residency.detach(block)
        return len(blocks), sum(map(self.residency.holds, blocks))

    def count(self, roots: frozenset[PrefixKey]) -> int:
        """Blocks of these scopes that can be found."""
        return len(self.residency.of_scopes(roots))

    # Below, how it is done.

    def _run(self, ids: Sequence[BlockId]) -> Iterator[NodeBlock]:
        """The leading blocks that are served from memory, each proven by its identity."""
        for block_id in ids:
            block = self.residency.find(block_id.key)
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
        sources = job.loaded.sources or (TierName.DISK,) * num_loaded
        num_remote = sources.count(TierName.REMOTE)
        self.counts.disk_hits += num_loaded - num_remote
        self.counts.remote_hits += num_remote
        for block, source in zip(blocks[:num_loaded], sources, strict=True):
            block.state, block.is_below = NodeBlockState.HELD, source is TierName.DISK
            if not block.detached:
                self.residency.tell(EventKind.MOVED, block, source=source)
            if not block.is_below:  # the next hit comes from this machine's disk
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
    """Remove the jobs that are done. Each is looked at once, for one may end meanwhile."""
    done: list[tuple[J, list[NodeBlock]]] = []
    waiting: list[tuple[J, list[NodeBlock]]] = []
    for entry in jobs:
        (done if entry[0].done else waiting).append(entry)
    jobs[:] = waiting
    return done
