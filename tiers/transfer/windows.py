"""Restores layers' windows in blocks that a longer prefix left behind, for a shorter prefix.

If a layout has windows, a prefix needs only its last `reach` blocks whole. Of the blocks before
those it needs the lasting part. A longer prefix may have left only the lasting part of a block that
a shorter one needs whole. Then the other part is read, or the prefix is cut. Engine thread only.
Nothing here waits.
"""

from collections.abc import Sequence

from tiers.blocks.part import Part
from tiers.errors import MissReason
from tiers.memory.block import Block
from tiers.memory.residency import Residency
from tiers.tier import TierName
from tiers.transfer.mover import BLOCKS_PER_LOAD, LoadJob, Mover
from tiers.transfer.ticket import Ticket


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
        lacking = [block for block in ticket.blocks[-self._reach :] if not block.is_whole]
        if any(block in blocks for _, blocks in self._reads for block in lacking):
            return False
        if lacking and not ticket.mended:
            ticket.mended = True
            if self._mend(lacking):
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

    def _mend(self, blocks: Sequence[Block]) -> bool:
        """Read the missing part of blocks that have their lasting part. False if one cannot be
        had."""
        residency = self._residency
        if self._mover is None or not all(block.held_below for block in blocks):
            return False
        for block in blocks:
            if block.frame is None and not residency.demote(block):
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

    def _cut(self, ticket: Ticket) -> None:
        """Shorten the ticket to the longest prefix whose last blocks are whole."""
        run = end = 0
        for number, block in enumerate(ticket.blocks, 1):
            run = run + 1 if block.is_whole else 0
            if run >= min(number, self._reach):
                end = number
        ticket.stop = next((b.fault for b in ticket.blocks[end:] if b.fault), MissReason.ABSENT)
        for block in ticket.cut(end):
            self._residency.release(block, block.use)
