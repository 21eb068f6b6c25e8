"""Copies blocks down: on eviction, and ahead of need so that a later eviction costs nothing.

Engine thread only, with bounded work per step. A request pays for one copy for each slot that it
takes from a block without a copy below. Blocks go from the device to host frames by a copy. The
mover's writer thread takes them from host frames to the disk, coldest first, whenever it has room.
A prefix is written before its continuations, so a writer that falls behind leaves whole prefixes.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from itertools import islice

from tiers.blocks.keys import PrefixKey
from tiers.blocks.part import Part
from tiers.errors import CopyFailed
from tiers.memory.block import Below, Block, DeviceState
from tiers.memory.host_tier import MIN_LOOKAHEAD
from tiers.memory.losses import LossLog
from tiers.memory.residency import Residency
from tiers.policy.admission import Demotion, WritePolicy
from tiers.telemetry.events import CacheEvent
from tiers.tier import Age, Cause, TierName
from tiers.transfer.mover import Mover, StoreJob

BLOCKS_PER_STORE = 8  # written together, in one turn of the commit lane
MAX_BUSY_SHARE = 1 / 2  # of the frames, that may wait for the disk at once: they cannot be evicted
FULL_MEMORY = 64  # after this many stores that drop no block, the disk is not full
CLEAN_PER_BURST = 1.25  # with checks an eighth of the part apart, one burst is always clean
BURST_MEMORY = 0.9  # decay of the largest burst per turnover of the host
FLUSH_POLL_S = 0.002
WAITING = Below.WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class DemotionSettings:
    """Settings for how far ahead of need blocks are copied down."""

    write_policy: WritePolicy = WritePolicy.ON_EVICT
    ahead: float = 1 / 16  # share of a memory tier, at its cold end, to keep clean
    device_copies_per_step: int = 4  # at least
    num_ghosts: int = 1  # keys of departed blocks that ON_SECOND_HIT remembers


@dataclass(slots=True)
class _Store:
    job: StoreJob
    blocks: list[Block]


class Demoter:
    """Keeps the cold ends of the device and the host clean. Flushes at a graceful stop."""

    def __init__(
        self, residency: Residency, mover: Mover | None, settings: DemotionSettings
    ) -> None:
        self._residency = residency
        self._mover = mover
        self._settings = settings
        self._apart = residency.pool.layout.apart
        self._stores: list[_Store] = []
        self._eager: OrderedDict[Block, None] = OrderedDict()  # to be written soon
        self._admission: Demotion[PrefixKey] = Demotion(settings.write_policy, settings.num_ghosts)
        self._device_window = max(2, int(residency.pool.num_blocks * settings.ahead))
        self._device_looked_at = -self._device_window  # `num_slots_taken` then
        self._slots_taken = 0  # `num_slots_taken` at the last step
        self._to_copy: deque[Block] = deque()
        self._spared: Collection[Block] = ()
        num_frames = residency.frames.num_frames if residency.frames else 0
        self._max_busy = max(BLOCKS_PER_STORE, int(num_frames * MAX_BUSY_SHARE))
        self._num_busy = 0  # blocks in the stores under way
        self._host_window = max(2, int(num_frames * settings.ahead))
        self._stores_while_full = 0  # stores left until the disk no longer counts as full
        self._looked_at = -num_frames  # `num_frames_taken` then
        self._risky: list[Block] = []  # found by that check, and not handed to the writer since
        self._num_frames = num_frames
        self._burst = self._last_burst = self._turnover = 0
        self._idle_since = 0  # `num_frames_taken` when the writer was last idle
        residency.evictor.demote = self.copy_down
        residency.host.has_below = mover is not None
        if mover is not None:
            residency.queue.worth = self._worth_waiting
            residency.evictor.skips = self._skips
            residency.evictor.on_lost = LossLog().note

    def committed(self, block: Block) -> None:
        """Take in a block that has just filled: a second use, if it was seen before."""
        assert block.key is not None
        if self._mover is None or not self._admission.on_use(block.key):
            return
        if self._settings.write_policy is WritePolicy.WRITE_THROUGH:
            self._eager[block] = None
        else:
            block.hits += 1

    def write(self, block: Block) -> bool:
        """Queue a block to be written soon. False if the disk is not to have it."""
        if self._mover is None or not (block.pinned or self._worth_writing(block)):
            return False
        if self._dirty(block):
            self._eager[block] = None
        return self._dirty(block)

    def write_now(self, block: Block) -> bool:
        """Write a block ahead of the normal queue. False if it is not to be written."""
        if self._mover is None or not self._dirty(block) or block.below is Below.REFUSED:
            return False
        self._eager[block] = None
        return True

    def step(self) -> None:
        self._collect()
        if self._residency.frames is None:
            return
        self._watch_bursts()
        self._clean_device()
        if self._mover is not None and self._mover.store_room:
            self._write_eager()
            self._write_behind(self._mover)
            if not self._stores:
                self._idle_since = self._residency.evictor.num_frames_taken

    @property
    def num_stores(self) -> int:
        return len(self._stores)

    @property
    def is_writing(self) -> bool:
        """Whether a block that was to be written soon is not written yet."""
        return bool(self._eager or self._stores)

    def copy_down(
        self, block: Block, sparing: Collection[Block] = (), *, roomy: bool = False
    ) -> bool:
        """Copy a device block to a host frame. False if only blocks in `sparing` could give one, or
        if the copy failed. A block goes without windows that its last use did not need. `roomy`:
        the frame is to have room for them nevertheless."""
        residency = self._residency
        assert block.slot is not None and block.frame is None, f"{block} cannot be copied down"
        passed = self._apart and block.held_below and not block.use.windows
        whole = block.slot_whole and not passed
        frame = residency.take_frame(block.scope, sparing, lesser=not (whole or roomy))
        if frame is None:
            return False
        started = time.perf_counter()
        frame.part = Part.WHOLE if whole else Part.LASTING
        nbytes = residency.pool.layout.part_nbytes(frame.part)
        try:
            copy = residency.pool.copy_out(block.slot, frame)
        except CopyFailed as error:
            residency.give_frame(frame)
            residency.copies.failed(TierName.DEVICE, error)
            return False
        residency.settle_frame(block, frame)
        residency.copies.watch(copy, (block,), TierName.DEVICE, TierName.HOST, started, nbytes)
        residency.counters.count(TierName.DEVICE, CacheEvent.DEMOTED)
        residency.counters.came(block, TierName.HOST, TierName.DEVICE)
        return True

    def flush(self, deadline_s: float = 60.0) -> int:
        """Write every full block that is not on disk. Returns how many could not be written.

        Blocks the engine thread, so use it only for a graceful stop. Writes prefixes before their
        continuations, so a flush cut short still leaves usable prefixes.
        """
        if self._mover is None or self._residency.frames is None:
            return 0
        give_up = time.monotonic() + deadline_s
        todo = [block for block in self._residency.index if self._dirty(block)]
        todo.sort(key=lambda block: block.depth)
        pending = deque(todo)
        while (pending or self._stores) and time.monotonic() < give_up:
            self._collect()
            batch = [pending.popleft() for _ in range(min(BLOCKS_PER_STORE, len(pending)))]
            # A block that was being written when the flush began may be below by now.
            batch = [block for block in batch if self._dirty(block)]
            refused = [block for block in self._store(batch) if self._dirty(block)]
            pending.extendleft(reversed(refused))
            if refused and not self._stores:
                break  # no work under way will free a frame for them
            if refused or not pending:
                time.sleep(FLUSH_POLL_S)
        return sum(self._dirty(block) for block in todo)

    def _clean_device(self) -> None:
        """Copy down the next blocks to leave the device: a few per step, or twice as many as the
        last step took slots. The cold end is checked
        again once an eighth of it has left, so a check costs little per block."""
        residency = self._residency
        taken = residency.evictor.num_slots_taken - self._slots_taken
        self._slots_taken = residency.evictor.num_slots_taken
        if residency.pool.num_free >= self._device_window:
            return
        if not self._to_copy:
            left = residency.evictor.num_slots_taken - self._device_looked_at
            if left < max(1, self._device_window // 8):
                return
            self._device_looked_at = residency.evictor.num_slots_taken
            cold = residency.device.policy.coldest(self._device_window)
            self._spared = frozenset(cold)  # otherwise two would take turns in one frame for ever
            self._to_copy = deque(cold)
        # Of a chunk of eight blocks, each would else be copied when its slot is taken.
        most = max(self._settings.device_copies_per_step, 2 * taken)
        copies = 0
        while self._to_copy and copies < most:
            block = self._to_copy.popleft()
            idle = block.device >= DeviceState.EVICTABLE
            if idle and block.frame is None and block.key is not None:
                if not self.copy_down(block, self._spared):
                    self._to_copy.clear()
                copies += 1

    def _watch_bursts(self) -> None:
        """Track the most frames taken between two idle moments of the writer. Decays slowly,
        because the longest prompts are many turnovers apart and each would find too few clean
        frames."""
        residency = self._residency
        taken = residency.evictor.num_frames_taken
        if taken - self._turnover > self._num_frames:
            self._turnover = taken
            self._last_burst = max(self._burst, int(self._last_burst * BURST_MEMORY))
            self._burst = 0
        self._burst = max(self._burst, taken - self._idle_since)
        burst = max(self._burst, self._last_burst)
        residency.host.lookahead = max(MIN_LOOKAHEAD, int(burst * CLEAN_PER_BURST))

    def _write_behind(self, mover: Mover) -> None:
        """Write all waiting blocks while the disk has room. Once it is full, a second copy costs it
        other blocks. Then only the coldest are written, as many as may have to leave at once."""
        queue = self._residency.queue
        if not queue:
            return
        at_risk = self._at_risk() if self._stores_while_full else None
        while mover.store_room and self._num_busy < self._max_busy:
            todo = queue if at_risk is None else [b for b in at_risk if b in queue]
            batch: list[Block] = []
            for block in islice(todo, BLOCKS_PER_STORE):
                if block not in batch:
                    batch += self._leading_to(block, set(batch))
                if len(batch) >= BLOCKS_PER_STORE:
                    break
            if not batch or self._store(batch[:BLOCKS_PER_STORE]):
                self._risky = []
                return
        self._risky = [block for block in at_risk or () if block in queue]

    def _at_risk(self) -> list[Block]:
        """The coldest host blocks. Until some have left since the last check: those that the writer
        had no room for at that check.

        A check costs time in proportion to the part's length. A block is written at most once per
        check. Otherwise a disk smaller than this part would be written without end, because each
        write evicts another block.
        """
        residency = self._residency
        if residency.evictor.num_frames_taken - self._looked_at >= self._clean_part // 8:
            self._looked_at = residency.evictor.num_frames_taken
            self._risky = residency.host.policy.coldest(self._clean_part)
        return self._risky

    @property
    def _clean_part(self) -> int:
        return max(self._host_window, min(self._max_busy, self._residency.host.lookahead))

    def _leading_to(self, block: Block, taken: Container[Block]) -> list[Block]:
        """The run of waiting blocks that ends with this one, from first to last."""
        run = [block]
        index = self._residency.index
        while block.parent is not None:
            above = index.get(block.parent)
            if above is None or above.below is not WAITING or above in taken:
                break
            run.append(above)
            block = above
        return run[::-1]

    def _dirty(self, block: Block) -> bool:
        """Whether memory alone holds the block, and a tier below can take what memory has of it."""
        return block.is_dirty and (self._apart or block.writes_whole)

    def _worth_waiting(self, block: Block) -> bool:
        """Whether the disk should have a block that it does not have."""
        return self._dirty(block) and self._worth_writing(block)

    def _worth_writing(self, block: Block) -> bool:
        return block.below in (Below.ABSENT, WAITING) and not self._skips(block)

    def _skips(self, block: Block) -> bool:
        """Whether the write policy keeps this block from the disk because it was not used again."""
        return self._settings.write_policy is WritePolicy.ON_SECOND_HIT and block.hits == 0

    def _write_eager(self) -> None:
        while self._eager and self._mover is not None and self._mover.store_room:
            batch = list(islice(self._eager, BLOCKS_PER_STORE))
            refused = self._store(block for block in batch if self._dirty(block))
            for block in batch:
                if block not in refused:
                    del self._eager[block]
            if refused:
                return

    def _store(self, blocks: Iterable[Block]) -> list[Block]:
        """Hand blocks to the writer thread, prefixes first. Blocks without a frame get one.

        Returns the blocks that could not be handed over, for lack of a frame, because of a copy
        under way, or because the queue was full.
        """
        assert self._mover is not None
        residency = self._residency
        batch: list[Block] = []
        refused: list[Block] = []
        for block in sorted(blocks, key=lambda block: block.depth):
            if block.frame is None and block.slot is not None:
                self.copy_down(block)
            if block.frame is None or block.busy:
                refused.append(block)
                continue
            residency.queue.begin_write(block)
            residency.host.sync(block)
            batch.append(block)
        if not batch:
            return refused
        frames = [block.frame for block in batch if block.frame is not None]
        now_s = time.monotonic()
        ages = [Age(now_s - block.created_s, block.idle_s(now_s)) for block in batch]
        job = StoreJob([block.identity() for block in batch], frames, ages)
        if self._mover.submit(job):
            self._stores.append(_Store(job, batch))
            self._num_busy += len(batch)
            return refused
        for block in batch:
            self._written(block, Below.ABSENT)
        return [*batch, *refused]

    def _collect(self) -> None:
        self._residency.copies.poll()
        if self._stores:
            self._stores = [store for store in self._stores if not self._collect_one(store)]

    def _collect_one(self, store: _Store) -> bool:
        if not store.job.done:
            return False
        residency = self._residency
        assert self._mover is not None
        below = self._mover.below
        if not store.job.failed:
            num_blocks, seconds = len(store.blocks), store.job.seconds
            residency.counters.transfers.observe(TierName.HOST, below, num_blocks, seconds)
        self._num_busy -= len(store.blocks)
        dropped = set(store.job.dropped)
        for block in store.blocks:
            stands = not store.job.failed and block.key not in dropped
            self._written(block, Below.HELD if stands else Below.REFUSED)
            if stands:
                residency.counters.count(TierName.HOST, CacheEvent.DEMOTED)
                residency.counters.count(below, CacheEvent.STORED)
        for key in dropped:
            held = residency.index.get(key)
            if held is not None:
                residency.queue.dropped(held)
                residency.host.sync(held)
            else:
                residency.evictor.evicted_keys.note(key, below, Cause.ROOM)
        mine = {block.key for block in store.blocks}
        residency.counters.count(below, CacheEvent.EVICTED, len(dropped - mine))
        full = bool(dropped - mine)
        self._stores_while_full = FULL_MEMORY if full else max(0, self._stores_while_full - 1)
        return True

    def _written(self, block: Block, below: Below) -> None:
        self._residency.queue.end_write(block, below)
        self._residency.host.sync(block)
