"""The blocks of one layout as a node's clients use them, and their moves to and from the tier
below.

    absent ──reserve──► COMPUTING ──commit──► READY ──evict──► absent     from clients
    absent ──lease────► LOADING ────loaded──► READY                       from the tier below

Only the node's thread calls a pool, so it has no locks. The threads of its `Mover` read and write
the tier below. Its `Residency` is that of the embedded engine, without a device and over shared
frames. A COMPUTING block belongs to one client and is served to nobody. When that client leaves,
the block is dropped.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from tiers.blocks.keys import TOKEN_BYTES, BlockId, PrefixKey
from tiers.blocks.packing import pack_blocks
from tiers.memory.block import Block, BlockState
from tiers.memory.device import DevicePool
from tiers.memory.index import BlockIndex
from tiers.memory.lru import DeviceLru
from tiers.memory.residency import Residency
from tiers.node.arena import SharedArena, SharedMemory
from tiers.node.capacity import Capacity
from tiers.node.messages import TIERS
from tiers.policy.admission import WritePolicy
from tiers.policy.policy import Use
from tiers.telemetry.events import CacheEvent, EventStream
from tiers.tier import TierName
from tiers.transfer.demotion import Demoter, DemotionSettings
from tiers.transfer.economy import Cost, CostLine
from tiers.transfer.mover import LoadJob, Mover, ProbeJob

READY = BlockState.READY
FETCHED_S = 10.0  # that blocks are kept for a lease: vLLM may have no room yet
FETCHED_SHARE = 1 / 4  # of the memory, at most, for blocks so kept
JOB_BYTES = 12 << 20  # a reader loads so much at once: a few ms, and the others share a run
JOBS_PER_RUN = 16  # at most, so that the queue has room for other runs


@dataclass(slots=True)
class PoolCounts:
    """Counters that only grow, in blocks."""

    stored: int = 0
    collisions: int = 0
    overloaded: int = 0  # loads refused because the tier below's queue was full
    hits: Counter[TierName] = field(default_factory=Counter)

    def as_json(self) -> dict[str, int]:
        plain = {name: getattr(self, name) for name in ("stored", "collisions", "overloaded")}
        return plain | {f"{tier}_hits": self.hits[tier] for tier in TIERS}


@dataclass(slots=True, eq=False)
class Lease:
    """A run of blocks that a client asked for. `is_ready` once none of them is being loaded."""

    blocks: list[Block]

    @property
    def is_ready(self) -> bool:
        return all(block.state is not BlockState.LOADING for block in self.blocks)


@dataclass(slots=True, eq=False)
class NodeProbe:
    """The tier of each block in the leading run held: of those in memory or on their way there,
    and of the others, which are probed below."""

    above: list[TierName]
    job: ProbeJob | None

    @property
    def is_ready(self) -> bool:
        return self.job is None or self.job.done

    @property
    def tiers(self) -> list[TierName]:
        below = self.job.tiers if self.job is not None else ()
        return self.above + list(below)


@dataclass(slots=True, eq=False)
class _LoadRun:
    """Jobs that load one run of blocks together, and where the blocks came from so far."""

    begun_s: float = field(default_factory=time.monotonic)
    num_jobs: int = 0
    sources: list[TierName] = field(default_factory=list)


class Pool:
    """The blocks of one layout. `mover` reaches the tier below; it is None if there is none."""

    def __init__(
        self,
        memory: SharedMemory,
        capacity: Capacity,
        mover: Mover | None = None,
        *,
        wake: Callable[[], None] = lambda: None,
        stream: EventStream | None = None,
    ) -> None:
        """`wake` wakes the node's thread. Any thread may call it."""
        self.memory = memory
        self.capacity = capacity
        self.mover = mover
        self.wake = wake
        self.used: Callable[[Sequence[PrefixKey]], None] = lambda keys: None  # tells the tier below
        self.closed: frozenset[PrefixKey] = frozenset()  # scopes being purged: not served, not kept
        self.counts = PoolCounts()
        self.arena = arena = SharedArena(memory, capacity)
        quotas = {TierName.HOST: capacity.quotas} if capacity.quotas is not None else None
        device = DevicePool(memory.layout, 0)
        self.residency = Residency(
            BlockIndex(), device, arena, DeviceLru(), capacity, stream, quotas=quotas
        )
        if (room := self.residency.host_room) is not None:
            room.room_of = capacity.room_of
            room.sharers = capacity.rooms.values()
            capacity.rooms[arena] = room
        capacity.queues.append(self.residency.queue)
        self.residency.host.queues = capacity.queues
        writes = DemotionSettings(write_policy=WritePolicy.WRITE_THROUGH)
        self.demoter = Demoter(self.residency, mover, writes)
        self._by_frame: dict[int, Block] = {}  # the last block of each frame
        self._loads: list[tuple[LoadJob, list[Block], _LoadRun]] = []
        self._costs: defaultdict[TierName, Cost] = defaultdict(Cost)  # of a run's bytes
        self._fetched: dict[Block, float] = {}  # until when they are kept for a lease; acquired

    # Requests of clients.

    def probe(self, ids: Sequence[BlockId]) -> NodeProbe:
        """Find how many leading blocks are held, and where. Ready once the tier below answers."""
        above = [TierName.HOST] * len(self._run(ids))
        if self.mover is not None:
            above += [self.mover.below] * len(self._run(ids[len(above) :], rising=True))
        rest = ids[len(above) :]
        if not rest or self._is_closed(rest) or self.mover is None:
            return NodeProbe(above, None)
        if self.residency.index.get(rest[0].key) is not None:
            return NodeProbe(above, None)
        job = ProbeJob(rest)
        return NodeProbe(above, job if self.mover.submit(job) else None)

    def fetch(self, ids: Sequence[BlockId]) -> None:
        """Load a run's blocks that memory lacks, and keep them `FETCHED_S` for a lease."""
        room = int(FETCHED_SHARE * self.capacity.capacity_bytes) // self.memory.stride
        rest = ids[len(self._run(ids)) :][: max(0, room - len(self._fetched))]
        until_s = time.monotonic() + FETCHED_S
        self._fetched |= dict.fromkeys(self._load(rest), until_s)

    def lease(self, ids: Sequence[BlockId]) -> Lease:
        """Lease the leading run of these blocks. Blocks held only below are loaded first. Of a
        window, the first blocks may have left memory before the last."""
        blocks: list[Block] = []
        while more := self._hold(ids[len(blocks) :]) or self._load(ids[len(blocks) :]):
            blocks += more
        return Lease(blocks)

    def settle(self, lease: Lease) -> list[int]:
        """The frames of a ready lease's leading run that is held. The rest is released."""
        held = 0
        while held < len(lease.blocks) and lease.blocks[held].state is READY:
            held += 1
        for block in lease.blocks[held:]:
            self.residency.release(block, block.use)
        return [block.frame.number for block in lease.blocks[:held] if block.frame is not None]

    def give_up(self, lease: Lease) -> None:
        """Drop a lease whose client left before it was ready."""
        self._release(lease.blocks)

    def release(self, frames: Sequence[int]) -> None:
        """End the lease of these frames. The last block of a run becomes its coldest."""
        self._release([self._by_frame[frame] for frame in frames])

    def reserve(self, ids: Sequence[BlockId]) -> list[tuple[int, int]]:
        """Reserve frames for the blocks not in memory yet. Returns (position, frame) for each."""
        pairs: list[tuple[int, int]] = []
        if self._is_closed(ids):
            return pairs
        for position, (block_id, packed) in enumerate(zip(ids, _packed(ids), strict=True)):
            standing = self.residency.index.get(block_id.key)
            if standing is not None:
                self.counts.collisions += not _is(standing, block_id, packed)
                continue
            block = self._add(block_id, packed, BlockState.COMPUTING)
            if block is None or block.frame is None:
                break
            pairs.append((position, block.frame.number))
        return pairs

    def commit(self, frames: Sequence[int]) -> None:
        """Serve frames that the client has written, from now on, and write them below."""
        blocks = [self._by_frame[frame] for frame in frames]
        for block in blocks:
            block.state = READY
            if block.key is not None:
                self.residency.counters.came(block, TierName.HOST)
                self.residency.entered(block)
        self._release(blocks)
        for block in blocks:
            self.demoter.write(block)
        self.counts.stored += len(frames)
        self.work()

    def abandon(self, frames: Sequence[int]) -> None:
        """Drop unfinished blocks whose writer has left."""
        for frame in frames:
            self._drop(self._by_frame[frame])

    # Results from the threads of the tier below.

    def work(self) -> None:
        """Process finished loads and writes, and start the next writes."""
        self._loads = [load for load in self._loads if not self._loaded(*load)]
        self.demoter.step()
        if self._fetched:
            self._release(self._expired())

    def is_unwritten(self, key: PrefixKey) -> bool:
        """Whether the block is in memory and not yet below."""
        block = self.residency.index.get(key)
        return block is not None and not block.held_below

    @property
    def load_lines(self) -> Mapping[TierName, CostLine]:
        """The seconds of a load by its bytes, from each tier that was loaded from."""
        return {tier: cost.line for tier, cost in self._costs.items()}

    @property
    def is_writing(self) -> bool:
        """Whether any block is still waiting for its write below or being written."""
        return self.demoter.is_writing

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def count_of(self, event: CacheEvent) -> int:
        return self.residency.counters.events[TierName.HOST, event]

    @property
    def lost(self) -> int:
        """Blocks that were evicted before the tier below had them."""
        return self.count_of(CacheEvent.LOST) if self.mover is not None else 0

    def check(self) -> None:
        """Assert that frames are conserved, and every state is what it should be."""
        blocks = self._by_frame.values()
        detached = [each for each in blocks if each.key is None and each.frame is not None]
        self.residency.check(detached=detached)
        self.arena.check()
        self.capacity.check()

    # Internals.

    def _hold(self, ids: Sequence[BlockId]) -> list[Block]:
        """The leading blocks that memory can serve, acquired."""
        blocks = self._run(ids)
        if blocks:
            self.residency.acquire_run(blocks)
        self.counts.hits[TierName.HOST] += len(blocks) - self._take_fetched(blocks)
        self.used([block.key for block in ids[: len(blocks)]])
        return blocks

    def _run(self, ids: Sequence[BlockId], *, rising: bool = False) -> list[Block]:
        """The leading blocks that memory can serve or, with `rising`, also those that are being
        loaded. The identity of each is compared."""
        states = (READY, BlockState.LOADING) if rising else (READY,)
        get, run = self.residency.index.get, list[Block]()
        if not ids or get(ids[0].key) is None:
            return run  # before anything is packed
        for block_id, packed in zip(ids, _packed(ids), strict=True):
            block = get(block_id.key)
            if block is None or block.state not in states:
                break
            if not _is(block, block_id, packed):
                self.counts.collisions += not rising
                break
            run.append(block)
        return run

    def _take_fetched(self, blocks: Sequence[Block]) -> int:
        """These are leased, so they are no longer kept for it. Returns how many were."""
        mine = [block for block in blocks if self._fetched.pop(block, None) is not None]
        for block in mine:
            self.residency.release(block, block.use)
        return len(mine)

    def _expired(self) -> list[Block]:
        """Take the fetched blocks that were not leased in time."""
        now_s, expired = time.monotonic(), list[Block]()
        for block, until_s in self._fetched.items():
            if until_s >= now_s:
                break  # the others came later
            expired.append(block)
        for block in expired:
            del self._fetched[block]
        return expired

    def _add(self, block_id: BlockId, packed: bytes, state: BlockState) -> Block | None:
        """A new block with a frame and one user. None if no block can leave to make room."""
        frame = self.residency.take_frame(block_id.scope)
        if frame is None:
            return None
        index = self.residency.index
        above = index.get(block_id.parent)
        block = Block(time.monotonic())
        block.state, block.ref_count = state, 1
        block.busy = state is BlockState.LOADING
        depth = above.depth + 1 if above is not None else 0
        index.insert(block, block_id, packed, depth)
        self.residency.settle_frame(block, frame)
        self._by_frame[frame.number] = block
        return block

    def _drop(self, block: Block) -> None:
        """Forget a block that was never complete."""
        block.state, block.busy = BlockState.LOST, 0
        if block.frame is not None:
            self.residency.host.free(block)
        if block.key is not None:
            self.residency.index.remove(block)

    def _release(self, blocks: Sequence[Block]) -> None:
        use = Use(time.monotonic(), blocks[0].scope if blocks else None)
        for block in reversed(blocks):
            self.residency.release(block, use)

    def _load(self, ids: Sequence[BlockId]) -> list[Block]:
        """Begin to load the leading blocks that memory lacks, with those under way."""
        index, packed = self.residency.index, _packed(ids)
        rising = self._run(ids, rising=True)
        for block in rising:
            self.residency.acquire(block)
        self._take_fetched(rising)
        lacking = takewhile(lambda each: index.get(each.key) is None, ids[len(rising) :])
        rest = list(lacking)
        if self.mover is None or not rest or self._is_closed(rest):
            return rising
        size = max(1, JOB_BYTES // self.memory.stride, -(-len(rest) // JOBS_PER_RUN))
        tokens = packed[len(rising) : len(rising) + len(rest)]
        run = _LoadRun()
        for start in range(0, len(rest), size):
            part = rest[start : start + size]
            fresh = self._load_part(self.mover, part, tokens[start : start + size], run)
            rising += fresh
            if len(fresh) < len(part):
                break
        return rising

    def _load_part(
        self, mover: Mover, ids: Sequence[BlockId], packed: Sequence[bytes], run: _LoadRun
    ) -> list[Block]:
        """Start one job that loads these blocks, as far as there are frames for them."""
        fresh: list[Block] = []
        for block_id, tokens in zip(ids, packed, strict=True):
            block = self._add(block_id, tokens, BlockState.LOADING)
            if block is None:
                break
            fresh.append(block)
        frames = [block.frame for block in fresh if block.frame is not None]
        job = LoadJob(ids[: len(fresh)], frames)
        if not fresh or not mover.submit(job):
            self.counts.overloaded += bool(fresh)
            for block in fresh:
                self._drop(block)
            return []
        self._loads.append((job, fresh, run))
        run.num_jobs += 1
        return fresh

    def _loaded(self, job: LoadJob, blocks: list[Block], run: _LoadRun) -> bool:
        if not job.done:
            return False
        assert self.mover is not None
        below, num_loaded = self.mover.below, job.loaded.num_blocks
        sources = job.loaded.sources or (below,) * num_loaded
        self.counts.hits.update(sources)
        for block, source in zip(blocks[:num_loaded], sources, strict=True):
            block.state = READY
            self.residency.queue.loaded(block, held=source is below)
            block.busy -= 1
            self.residency.host.sync(block)
            if block.key is not None:
                self.residency.counters.came(block, TierName.HOST, source)
                self.residency.entered(block)
                self.demoter.write(block)  # so that the next hit comes from the tier below
        for block in blocks[num_loaded:]:
            self._drop(block)
        run.num_jobs -= 1
        run.sources += sources
        if not run.num_jobs and len(set(run.sources)) == 1:
            nbytes = len(run.sources) * self.memory.layout.nbytes
            self._costs[run.sources[0]].observe(nbytes, time.monotonic() - run.begun_s)
        return True

    def _is_closed(self, ids: Sequence[BlockId]) -> bool:
        return bool(ids and self.closed) and ids[0].scope in self.closed


def _packed(ids: Sequence[BlockId]) -> Sequence[bytes]:
    """The tokens of each block as resident blocks store them."""
    if not ids:
        return ()
    return pack_blocks(b"".join(each.tokens for each in ids), len(ids[0].tokens) // TOKEN_BYTES)


def _is(block: Block, block_id: BlockId, packed: bytes) -> bool:
    scope, parent, _, _, content = block_id
    same = block.packed == packed and block.parent == parent
    return same and block.scope == scope and block.content == content
