"""Copying blocks down ahead of need, so that evicting them later costs nothing.

Engine thread only, a bounded amount each step. From the device to host frames by a copy; from
host frames to the disk by the mover's writer thread.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from tiers.blocks.keys import PrefixKey
from tiers.memory.counters import CacheEvent
from tiers.memory.index import Block, BlockState
from tiers.memory.residency import Residency
from tiers.policy.admission import Demotion, WritePolicy
from tiers.telemetry.lifetimes import Cause
from tiers.tier import TierName
from tiers.transfer.mover import Mover, StoreJob

BLOCKS_PER_STORE = 8  # written side by side, and one commit lane turn
FLUSH_POLL_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class DemotionSettings:
    """How far ahead of need blocks are copied down."""

    write_policy: WritePolicy = WritePolicy.ON_EVICT
    ahead: float = 1 / 16  # share of a tier, at its cold end, that is kept clean
    device_copies_per_step: int = 4
    num_ghosts: int = 1  # keys that ON_SECOND_HIT remembers of blocks that left


@dataclass(slots=True)
class _Store:
    job: StoreJob
    blocks: list[Block]


class Demoter:
    """Keeps the cold ends of the device and the host clean; flushes at a graceful stop."""

    def __init__(
        self, residency: Residency, mover: Mover | None, settings: DemotionSettings
    ) -> None:
        self._residency = residency
        self._mover = mover
        self._settings = settings
        self._stores: list[_Store] = []
        self._eager: OrderedDict[Block, None] = OrderedDict()  # to be written soon
        self._admission: Demotion[PrefixKey] = Demotion(settings.write_policy, settings.num_ghosts)
        self._device_window = max(2, int(residency.pool.num_blocks * settings.ahead))
        num_frames = residency.frames.num_frames if residency.frames else 0
        self._host_window = max(2, int(num_frames * settings.ahead))

    def committed(self, block: Block) -> None:
        """A block has just filled: for one that was seen and evicted this is a second use."""
        assert block.key is not None
        if self._mover is None or not self._admission.on_use(block.key):
            return
        if self._settings.write_policy is WritePolicy.WRITE_THROUGH:
            self._eager[block] = None
        else:
            block.hits += 1

    def write(self, block: Block) -> bool:
        """Write a block soon if the disk is to have it; False where it is not."""
        if self._mover is None or not (block.kept or self._worth_writing(block)):
            return False
        if _is_dirty(block):
            self._eager[block] = None
        return _is_dirty(block)

    def step(self) -> None:
        """One step's share of background work."""
        self._collect()
        if self._residency.frames is None:
            return
        self._clean_device()
        if self._mover is not None and self._mover.store_room:
            self._write_eager()
            self._clean_host(self._mover)

    @property
    def num_stores(self) -> int:
        return len(self._stores)

    def flush(self, deadline_s: float = 60.0) -> int:
        """Write every full block that is not on disk; returns how many could not be.

        Blocks the engine thread: for a graceful stop only. Prefixes before what continues them,
        so that a flush cut short still leaves usable prefixes.
        """
        if self._mover is None or self._residency.frames is None:
            return 0
        give_up = time.monotonic() + deadline_s
        todo = [block for block in self._residency.index if _is_dirty(block)]
        todo.sort(key=lambda block: block.depth)
        pending = deque(todo)
        while (pending or self._stores) and time.monotonic() < give_up:
            self._collect()
            batch = [pending.popleft() for _ in range(min(BLOCKS_PER_STORE, len(pending)))]
            refused = [block for block in self._store(batch) if _is_dirty(block)]
            pending.extendleft(reversed(refused))
            if refused and not self._stores:
                break  # nothing under way will free a frame for them
            if refused or not pending:
                time.sleep(FLUSH_POLL_S)
        return sum(map(_is_dirty, todo))

    def _clean_device(self) -> None:
        residency = self._residency
        if residency.pool.num_free >= self._device_window:
            return
        cold = residency.device_policy.coldest(self._device_window)
        todo = [b for b in cold if b.frame is None and b.key is not None and not b.left_host]
        if not todo:
            return
        spared = set(cold)  # one's copy does not cost another's: two would take turns for ever
        for block in todo[: self._settings.device_copies_per_step]:
            if not residency.copy_down(block, spared):
                return

    def _clean_host(self, mover: Mover) -> None:
        frames = self._residency.frames
        assert frames is not None
        if frames.num_free >= self._host_window:
            return
        cold = self._residency.host_policy.coldest(self._host_window)
        dirty = [block for block in cold if self._wants_disk(block)]
        for start in range(0, len(dirty), BLOCKS_PER_STORE):
            if not mover.store_room:
                return
            self._store(dirty[start : start + BLOCKS_PER_STORE])

    def _wants_disk(self, block: Block) -> bool:
        if not _is_dirty(block) or block.frame is None or block.busy:
            return False
        if block.slot is not None and block.pins:
            return False  # it will come down again when its requests are done
        return self._worth_writing(block)

    def _worth_writing(self, block: Block) -> bool:
        if block.left_disk:
            return False
        return self._settings.write_policy is not WritePolicy.ON_SECOND_HIT or block.hits > 0

    def _write_eager(self) -> None:
        while self._eager and self._mover is not None and self._mover.store_room:
            batch = list(islice(self._eager, BLOCKS_PER_STORE))
            refused = self._store(block for block in batch if _is_dirty(block))
            for block in batch:
                if block not in refused:
                    del self._eager[block]
            if refused:
                return

    def _store(self, blocks: Iterable[Block]) -> list[Block]:
        """Hand blocks to the writer thread, prefixes first; those without a frame get one.

        Returns the blocks that could not be handed over now: no frame, a copy under way, or a
        full queue.
        """
        assert self._mover is not None
        residency = self._residency
        batch: list[Block] = []
        refused: list[Block] = []
        for block in sorted(blocks, key=lambda block: block.depth):
            if block.frame is None and block.slot is not None:
                residency.copy_down(block)
            if block.frame is None or block.busy:
                refused.append(block)
                continue
            residency.mark_busy(block)
            batch.append(block)
        if not batch:
            return refused
        frames = [block.frame for block in batch if block.frame is not None]
        job = StoreJob([block.identity() for block in batch], frames)
        if self._mover.submit(job):
            self._stores.append(_Store(job, batch))
            return refused
        for block in batch:
            residency.mark_idle(block)
        return [*batch, *refused]

    def _collect(self) -> None:
        self._residency.poll_copies()
        if self._stores:
            self._stores = [store for store in self._stores if not self._collect_one(store)]

    def _collect_one(self, store: _Store) -> bool:
        if not store.job.done:
            return False
        residency = self._residency
        if not store.job.failed:
            num_blocks, seconds = len(store.blocks), store.job.seconds
            residency.chronicle.transfers.observe(TierName.HOST, TierName.DISK, num_blocks, seconds)
        dropped = set(store.job.dropped)
        for block in store.blocks:
            residency.mark_idle(block)
            block.on_disk = not store.job.failed and block.key not in dropped
            block.left_disk = not block.on_disk
            if block.on_disk:
                residency.count(TierName.HOST, CacheEvent.DEMOTED)
                residency.count(TierName.DISK, CacheEvent.STORED)
        for key in dropped:
            held = residency.index.get(key)
            if held is not None:
                held.on_disk, held.left_disk = False, True
            else:
                residency.departures.note(key, TierName.DISK, Cause.ROOM)
        mine = {block.key for block in store.blocks}
        residency.count(TierName.DISK, CacheEvent.EVICTED, len(dropped - mine))
        return True


def _is_dirty(block: Block) -> bool:
    """A full block whose KV stands and is not on disk."""
    return block.key is not None and block.state is BlockState.READY and not block.on_disk
