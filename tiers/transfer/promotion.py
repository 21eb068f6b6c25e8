"""Promotes a prefix: from disk to host frames on reader threads, and from frames to device slots.

Engine thread only. The scheduler opens a ticket for a request that is about to run, advances it
once per step, and hands its blocks to the sequence. Nothing here waits.

If a layout has windows, a prefix needs only its last `reach` blocks whole. Of the blocks before
those it needs the lasting part, and no more is loaded or copied up (`tiers.transfer.windows`).
"""

import time
from collections.abc import Sequence

from tiers.blocks.chain import Chain
from tiers.blocks.part import Part
from tiers.errors import CopyFailed, MissReason
from tiers.memory.block import Block, BlockState
from tiers.memory.residency import Residency
from tiers.policy.policy import Use
from tiers.telemetry.events import CacheEvent
from tiers.tier import TierName
from tiers.transfer.economy import LoadEconomy
from tiers.transfer.mover import BLOCKS_PER_LOAD, LoadJob, Mover, ProbeJob
from tiers.transfer.ticket import Progress, Ticket, TicketState
from tiers.transfer.windows import WindowMender, lacking_windows, longest

_, LOADING, READY, LOST = BlockState
BLOCKS_PER_LIFT = 16  # one copy; its frames are then free for blocks that later slots evict


class Promoter:
    """Advances tickets. Owns the loads under way."""

    def __init__(self, residency: Residency, mover: Mover | None, economy: LoadEconomy) -> None:
        self._residency = residency
        self._mover = mover
        self._economy = economy
        self._layout = residency.pool.layout
        self._reach = self._layout.reach
        self._loads: list[tuple[LoadJob, list[Block], Ticket]] = []
        self._windows = WindowMender(residency, mover)

    def open(self, chain: Chain) -> Ticket:
        """Open a ticket that holds the blocks now above the disk. The disk is probed at once."""
        ticket = Ticket(chain, TicketState.SETTLED if self._mover is None else TicketState.OPEN)
        self._match(ticket)
        self._ask_disk(ticket)
        return ticket

    def advance(self, ticket: Ticket) -> Progress:
        """Advance the ticket one step without waiting for anything."""
        while True:
            try:
                return self._advance(ticket)
            except CopyFailed as error:
                self._residency.copies.failed(TierName.HOST, error)
                self._close_at(ticket)

    def _advance(self, ticket: Ticket) -> Progress:
        """Advance it one step. Raises CopyFailed, and then the first block that was not copied is
        that after those known to be on the device."""
        if ticket.is_loading:
            self._drop_lost(ticket)
            if any(block.state is LOADING for block in ticket.blocks):
                self._lift(ticket)
                return Progress.LOADING
            part = ticket.state is TicketState.LOADING_PART
            ticket.move(TicketState.OPEN if part else TicketState.SETTLED)
        if ticket.probe is not None:
            if not ticket.probe.done:
                return Progress.LOADING
            ticket.move(self._load(ticket))
            if ticket.is_loading:
                return Progress.LOADING
        if self._match(ticket):
            return Progress.WAITING
        if self._ask_disk(ticket):
            return Progress.LOADING
        if self._reach and not self._windows.stand(ticket):
            return Progress.LOADING
        if not self._lift(ticket):
            return Progress.NO_ROOM
        return Progress.READY if self._arrived(ticket) else Progress.LOADING

    def close(self, ticket: Ticket, use: Use) -> None:
        """Release the ticket's references. Loads under way finish, into the host tier."""
        self._residency.release_prefix(ticket.blocks, use)
        ticket.blocks.clear()
        ticket.sources.clear()

    def collect(self) -> None:
        """Process the loads that finished. Once per step, before tickets are advanced."""
        if self._loads:
            self._loads = [load for load in self._loads if not self._collect_one(*load)]
        self._windows.collect()

    @property
    def num_loads(self) -> int:
        return len(self._loads) + self._windows.num_reads

    def _match(self, ticket: Ticket) -> bool:
        """Acquire the blocks that continue the ticket. True if the next is being made."""
        if ticket.closed:
            return False
        start = len(ticket.blocks)
        found = self._residency.index.match(ticket.chain, start)
        makes_next = False
        for number, block in enumerate(found):
            if block.state is not READY:
                makes_next = True
                del found[number:]
                break
        if found:
            device, host = TierName.DEVICE, TierName.HOST
            if self._residency.acquire_run(found):
                ticket.sources += [device] * len(found)
                if ticket.num_on_device == start and not self._reach:
                    ticket.num_on_device += len(found)
            else:
                ticket.sources += [host if block.slot is None else device for block in found]
            ticket.blocks += found
        return makes_next

    def _ask_disk(self, ticket: Ticket) -> bool:
        start, end = len(ticket.blocks), len(ticket.chain.keys)
        if ticket.state is not TicketState.OPEN or start == end or self._mover is None:
            return False
        if ticket.closed:
            ticket.move(TicketState.SETTLED)
            return False
        lacking = lacking_windows(ticket) if self._reach else None
        job = ProbeJob(ticket.chain.block_ids(start, end), lacking)
        if not self._mover.submit(job):
            ticket.stop = MissReason.OVERLOADED
            ticket.move(TicketState.SETTLED)
            return False
        ticket.probe = job
        ticket.move(TicketState.PROBING)
        return True

    def _load(self, ticket: Ticket) -> TicketState:
        """Begin to load what the probe found, into free frames. Returns the next state."""
        assert ticket.probe is not None and self._mover is not None
        probe, ticket.probe = ticket.probe, None
        self._match(ticket)  # others may have loaded or computed part of it by now
        if probe.is_slower:
            ticket.stop = MissReason.SLOWER_THAN_COMPUTE
            self._economy.refused += 1
        start, layout = len(ticket.blocks), self._layout
        end = min(start + probe.held, len(ticket.chain.keys))
        if self._reach:
            end = longest(ticket, end, self._reach, probe.windows)
        if end <= start:
            return TicketState.SETTLED
        num_blocks = end - start
        lesser = max(0, num_blocks - self._reach) if self._reach else 0  # without their windows
        nbytes = num_blocks * layout.nbytes - lesser * layout.part_nbytes(Part.WINDOW)
        num_jobs = -(-num_blocks // BLOCKS_PER_LOAD)
        readers = min(self._mover.num_readers, num_jobs)
        if not self._economy.worth(num_blocks * layout.block_size, nbytes, readers):
            ticket.stop = MissReason.SLOWER_THAN_COMPUTE
            return TicketState.SETTLED
        num_before, whole_from = len(ticket.blocks), start + lesser
        self._load_runs(ticket, end, whole_from)
        begun = len(ticket.blocks) > num_before
        # Another request promotes or computes the next block. When it is ready, the disk is probed
        # again for the blocks after it.
        number = len(ticket.blocks)
        there = self._residency.index.get(ticket.chain.keys[number]) if number < end else None
        if there is not None and there.identity() == ticket.chain.block_id(number):
            return TicketState.LOADING_PART if begun else TicketState.OPEN
        return TicketState.LOADING if begun else TicketState.SETTLED

    def _load_runs(self, ticket: Ticket, end: int, whole_from: int) -> None:
        """Submit read jobs for the chain's next blocks up to `end`, as far as there is room."""
        start = len(ticket.blocks)
        while start < end and self._load_run(
            ticket, start, min(start + BLOCKS_PER_LOAD, end), whole_from
        ):
            start += BLOCKS_PER_LOAD

    def _load_run(self, ticket: Ticket, start: int, end: int, whole_from: int) -> bool:
        """Submit one read job for blocks [start, end) of the chain. Blocks before `whole_from` are
        read for their lasting part only. False stops the loading."""
        residency, chain = self._residency, ticket.chain
        assert self._mover is not None
        now_s = time.monotonic()
        blocks: list[Block] = []
        for number in range(start, end):
            if residency.index.get(chain.keys[number]) is not None:
                break
            frame = residency.take_frame(chain.root, lesser=number < whole_from)
            if frame is None:
                ticket.stop = MissReason.NO_ROOM
                break
            if number < whole_from:
                frame.part = Part.LASTING
            block = Block(now_s)
            block.state = LOADING
            residency.index.add(block, chain, number)
            block.busy = 1
            residency.settle_frame(block, frame)
            blocks.append(block)
        if not blocks:
            return False
        frames = [block.frame for block in blocks if block.frame is not None]
        job = LoadJob(chain.block_ids(start, start + len(blocks)), frames)
        if not self._mover.submit(job):
            ticket.stop = MissReason.OVERLOADED
            for block in blocks:
                self._lose(block, MissReason.OVERLOADED)
            return False
        self._loads.append((job, blocks, ticket))
        for block in blocks:
            residency.acquire(block)
            ticket.blocks.append(block)
            ticket.sources.append(self._mover.below)
        return len(blocks) == end - start

    def _collect_one(self, job: LoadJob, blocks: list[Block], ticket: Ticket) -> bool:
        if not job.done:
            return False
        num_loaded, reason = job.loaded.num_blocks, job.loaded.reason
        assert self._mover is not None
        below = self._mover.below
        sources = job.loaded.sources or (below,) * num_loaded
        others = set(sources) - {below}
        slowest = max(others, key=list(TierName).index) if others else below
        nbytes = sum(self._layout.part_nbytes(frame.part) for frame in job.frames[:num_loaded])
        if not others:
            self._economy.observe_load(nbytes, job.seconds)
        else:
            _tell_sources(ticket, blocks[0], sources)
        if num_loaded:
            transfers = self._residency.counters.transfers
            transfers.observe(slowest, TierName.HOST, num_loaded, job.seconds, nbytes)
        now_s = time.monotonic()
        for block, age_s in zip(blocks, job.loaded.ages, strict=False):
            block.created_s = now_s - age_s
        for number, block in enumerate(blocks):
            if number < num_loaded:
                block.state = READY
                self._residency.queue.loaded(block, held=sources[number] is below)
                block.hits += 1
                block.busy -= 1
                self._residency.host.sync(block)
                if block.key is None:
                    continue  # a purge removed it while it loaded
                self._residency.entered(block)
                self._residency.counters.count(sources[number], CacheEvent.PROMOTED)
                self._residency.counters.came(block, TierName.HOST, sources[number])
            else:
                self._lose(block, reason if number == num_loaded and reason else MissReason.ABSENT)
        return True

    def _lose(self, block: Block, reason: MissReason) -> None:
        """Take a block whose load failed off the index. Its tickets drop it at their next check."""
        block.state = LOST
        block.fault = reason
        block.busy = 0
        self._residency.host.free(block)
        if block.key is not None:  # a purge may remove blocks while they load
            self._residency.index.remove(block)

    def _drop_lost(self, ticket: Ticket) -> None:
        """Shorten the ticket to before the first block whose load failed."""
        for number, block in enumerate(ticket.blocks):
            if block.state is LOST:
                ticket.stop = block.fault or MissReason.ABSENT
                for lost in ticket.cut(number):
                    self._residency.release(lost, lost.use)
                return

    def _close_at(self, ticket: Ticket) -> None:
        """Shorten the ticket to before the first block whose copy failed, for good: the block
        stands where it stood, so that it would be found again."""
        ticket.closed, ticket.stop = True, MissReason.COPY
        for block in ticket.cut(ticket.num_on_device):
            self._residency.release(block, block.use)

    def _lift(self, ticket: Ticket) -> bool:
        """Copy leading blocks to the device. True when all have a slot. Raises CopyFailed."""
        residency = self._residency
        start = ticket.num_on_device = min(ticket.num_on_device, len(ticket.blocks))
        if start == len(ticket.blocks):
            return True
        lifted: list[Block] = []
        parts: list[Part] = []
        whole_from = len(ticket.blocks) - self._reach if self._reach else 0
        for number, block in enumerate(ticket.blocks[start:], start):
            if block.slot is None:
                if block.state is not READY:
                    break
                assert block.frame is not None, block
                whole = number >= whole_from and block.frame.part is Part.WHOLE
                if residency.take_slot(block, block.scope, lesser=not whole) is None:
                    break
                lifted.append(block)
                parts.append(Part.WHOLE if whole else Part.LASTING)
            elif self._reach and number >= whole_from and not block.slot_whole:
                if lifted:
                    self._copy_up(ticket, lifted, parts)
                    lifted, parts = [], []
                # Its frame may have to leave for another block; then `stand` has it read again.
                if not (block.is_whole and residency.device_room.widen(block)):
                    break
                self._copy_up(ticket, [block], [Part.WINDOW])
            ticket.num_on_device += 1
            if len(lifted) == BLOCKS_PER_LIFT:
                self._copy_up(ticket, lifted, parts)
                lifted, parts = [], []
        if lifted:
            self._copy_up(ticket, lifted, parts)
        return ticket.num_on_device == len(ticket.blocks)

    def _arrived(self, ticket: Ticket) -> bool:
        """Whether the rows of all its blocks are on the device. A step that read a row too early
        would delay every request in it."""
        pool = self._residency.pool
        return not pool.is_arriving or all(
            block.slot is not None and pool.arrived(block.slot) for block in ticket.blocks
        )

    def _copy_up(self, ticket: Ticket, blocks: Sequence[Block], parts: Sequence[Part]) -> None:
        """Copy these parts of host blocks into their slots. The blocks keep their frames. Raises
        CopyFailed, after taking back the slots."""
        residency = self._residency
        frames = [block.frame for block in blocks if block.frame is not None]
        slots = [block.slot for block in blocks if block.slot is not None]
        started = time.perf_counter()
        try:
            copy = residency.pool.copy_in(frames, slots, parts)
        except CopyFailed:
            ticket.num_on_device = ticket.blocks.index(blocks[0])
            for block, part in zip(blocks, parts, strict=True):
                if part is not Part.WINDOW:
                    residency.take_back(block)
            raise
        num_came = 0
        for block, part in zip(blocks, parts, strict=True):
            block.slot_whole = part is not Part.LASTING
            residency.host.lifted(block, leaves_first=residency.host_moves)
            if part is not Part.WINDOW:
                residency.counters.came(block, TierName.DEVICE, TierName.HOST)
                num_came += 1
        nbytes = sum(map(self._layout.part_nbytes, parts))
        residency.copies.watch(copy, blocks, TierName.HOST, TierName.DEVICE, started, nbytes)
        residency.counters.count(TierName.HOST, CacheEvent.PROMOTED, num_came)


def _tell_sources(ticket: Ticket, first: Block, sources: Sequence[TierName]) -> None:
    """Correct the ticket's sources for blocks from further below, for billing."""
    if first in ticket.blocks:
        start = ticket.blocks.index(first)
        ticket.sources[start : start + len(sources)] = sources
