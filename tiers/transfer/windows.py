"""Finds where a prefix can be resumed by a model with windows, and restores missing windows.

If a layout has windows, a prefix needs only its last `reach` blocks whole. Of the blocks before
those it needs the lasting part. The other part of a block, its windows, is loaded and leaves on its
own: a longer prefix may have left only the lasting part of a block that a shorter one needs whole,
and below memory windows have a place of their own in the order of eviction. So a prefix ends where
its last blocks have their windows in memory or below, and those not in memory are read. Engine
thread only. Nothing here waits.
"""

from collections.abc import Collection, Sequence

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.part import Part
from tiers.errors import MissReason
from tiers.memory.block import Block
from tiers.memory.residency import Residency
from tiers.tier import TierName
from tiers.transfer.mover import BLOCKS_PER_LOAD, LoadJob, Mover, ProbeJob
from tiers.transfer.ticket import Ticket


def longest(
    ticket: Ticket, end: int, reach: int, windows: Collection[PrefixKey | None] = ()
) -> int:
    """The longest prefix of at most `end` blocks whose last `reach` have their windows: in memory,
    or because they are among `windows`."""
    run = found = 0
    for number, key in enumerate(ticket.chain.keys[:end]):
        here = number < len(ticket.blocks) and ticket.blocks[number].is_whole
        run = run + 1 if here or key in windows else 0
        if run >= min(number + 1, reach):
            found = number + 1
    return found


def lacking_windows(ticket: Ticket) -> list[BlockId]:
    """Its blocks that memory holds without their windows."""
    id_of = ticket.chain.block_id
    return [id_of(number) for number, block in enumerate(ticket.blocks) if not block.is_whole]


class WindowMender:
    """Owns the reads of windows under way."""

    def __init__(self, residency: Residency, mover: Mover | None) -> None:
        self._residency = residency
        self._mover = mover
        self._layout = residency.pool.layout
        self._reach = self._layout.reach
        self._reads: list[tuple[LoadJob, list[Block]]] = []

    def stand(self, ticket: Ticket) -> bool:
        """Whether the last blocks are whole above the disk. May cut the ticket to a prefix of which
        this is true. False while missing parts are being read."""
        lacking = self._lacking(ticket)
        if lacking and ticket.mended:  # blocks after those that were asked about
            self._cut(ticket, {block.key for _, blocks in self._reads for block in blocks})
            lacking = self._lacking(ticket)
        if any(map(self._is_read, lacking)):
            return False
        if lacking and not ticket.mended:
            if ticket.windows is None and self._ask(ticket):
                return False
            if ticket.windows is not None:
                if not ticket.windows.done:
                    return False
                self._cut(ticket, ticket.windows.windows)
                lacking = self._lacking(ticket)
            ticket.mended = True
            if lacking and self._mend(lacking):
                return False
        if lacking:
            self._cut(ticket)
        # A block with a slot may now be one of the last and lack its windows there.
        before = max(0, len(ticket.blocks) - self._reach)
        ticket.num_on_device = min(ticket.num_on_device, before)
        return True

    def collect(self) -> None:
        """Process the reads that finished. Once per step."""
        if self._reads:
            self._reads = [read for read in self._reads if not self._collect_one(*read)]

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    def _is_read(self, block: Block) -> bool:
        return any(block in blocks for _, blocks in self._reads)

    def _lacking(self, ticket: Ticket) -> list[Block]:
        """Those of its last blocks that memory does not hold whole."""
        return [block for block in ticket.blocks[-self._reach :] if not block.is_whole]

    def _ask(self, ticket: Ticket) -> bool:
        """Ask the tiers below which missing windows they have. False if they cannot be asked."""
        job = ProbeJob((), lacking_windows(ticket))
        if self._mover is None or not self._mover.submit(job):
            return False
        ticket.windows = job
        return True

    def _mend(self, blocks: Sequence[Block]) -> bool:
        """Read the missing part of blocks that have their lasting part, unless it is being read: a
        frame belongs to one read. False if one cannot be had."""
        residency, blocks = self._residency, [block for block in blocks if not self._is_read(block)]
        if self._mover is None:
            return False
        for block in blocks:
            if block.frame is None and not residency.evictor.demote(block, blocks, roomy=True):
                return False
            if not (residency.host_room and residency.host_room.widen(block, blocks)):
                return False
        for start in range(0, len(blocks), BLOCKS_PER_LOAD):
            run = list(blocks[start : start + BLOCKS_PER_LOAD])
            frames = [block.frame for block in run if block.frame is not None]
            job = LoadJob([block.identity() for block in run], frames)
            for frame in frames:
                frame.part = Part.WINDOW
            if not self._mover.submit(job):
                for frame in frames:
                    frame.part = Part.LASTING
                return False
            for block in run:
                block.busy += 1
                residency.host.sync(block)
            self._reads.append((job, run))
        return True

    def _collect_one(self, job: LoadJob, blocks: list[Block]) -> bool:
        if not job.done:
            return False
        num_loaded, reason = job.loaded.num_blocks, job.loaded.reason
        for number, (block, frame) in enumerate(zip(blocks, job.frames, strict=True)):
            frame.part = Part.WHOLE if number < num_loaded else Part.LASTING
            block.busy -= 1
            self._residency.host.sync(block)
        if num_loaded:
            nbytes = num_loaded * self._layout.part_nbytes(Part.WINDOW)
            transfers = self._residency.counters.transfers
            assert self._mover is not None
            transfers.observe(self._mover.below, TierName.HOST, num_loaded, job.seconds, nbytes)
        if num_loaded < len(blocks):
            blocks[num_loaded].fault = reason
        return True

    def _cut(self, ticket: Ticket, windows: Collection[PrefixKey | None] = ()) -> None:
        """Shorten the ticket to where its last blocks are whole, or will be with `windows`."""
        end = longest(ticket, len(ticket.blocks), self._reach, windows)
        if end == len(ticket.blocks):
            return
        ticket.stop = next((b.fault for b in ticket.blocks[end:] if b.fault), MissReason.ABSENT)
        for block in ticket.cut(end):
            self._residency.release(block, block.use)
