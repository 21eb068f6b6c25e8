"""Finds where a prefix can be resumed by a model with recurrent states, and keeps checkpoints.

A checkpoint is the state after some block. It has that block's identity, and slots, frames, records
and an order of its own, in a `CacheGroup` whose layout is a checkpoint.

    positions of checkpoints, in memory and below ─► the longest ─► its blocks and the checkpoint
         ▲                                                               │ one of them is gone
         └───────────────────────── the next shorter ────────────────────┘

Engine thread only. Nothing here waits.
"""

from collections.abc import Callable

from tiers.blocks.chain import Chain
from tiers.errors import OutOfBlocks
from tiers.group import CacheGroup
from tiers.memory.residency import Residency
from tiers.policy.checkpoints import prompt_end
from tiers.transfer.mover import HeldJob
from tiers.transfer.promotion import Promoter
from tiers.transfer.ticket import Progress, Resume, Ticket, TicketState


class Checkpoints:
    """Composes the tickets of blocks with those of checkpoints."""

    def __init__(self, group: CacheGroup, residency: Residency, promoter: Promoter) -> None:
        self._group = group
        self._residency = residency
        self._promoter = promoter

    def peek(self, chain: Chain) -> int:
        """The number of leading tokens from which memory can resume now."""
        blocks = len(self._residency.index.match(chain))
        held = [number for number in self._in_memory(chain) if number <= blocks]
        return max(held, default=0) * chain.block_size

    def open(self, chain: Chain) -> Ticket:
        """A ticket for the longest prefix from which the prompt can be resumed. Its last token is
        always computed, so that prefix is shorter than the prompt."""
        chain.packed()  # once, for the chain and its heads
        ticket = Ticket(chain.head(0), TicketState.OPEN)
        positions = self._in_memory(chain)
        ticket.resume = Resume(chain, positions)
        first, last = max(positions, default=0), prompt_end(chain.num_tokens, chain.block_size)
        if first < last:
            job = HeldJob(chain.keys[first:last])
            if self._group.submit(job):
                ticket.resume.job = job
        return ticket

    def advance(self, ticket: Ticket) -> Progress:
        """Advance both parts by one step. When READY, blocks and checkpoint are on the device."""
        resume = ticket.resume
        assert resume is not None
        if resume.job is not None:
            if not resume.job.done:
                return Progress.LOADING
            first = max(resume.positions, default=0)
            below = [first + n for n, held in enumerate(resume.job.held, 1) if held]
            resume.positions += below
            resume.job = None
        while True:
            if resume.part is None and resume.positions:
                self._take_up(ticket, resume)
            progress = self._group.advance(resume.part) if resume.part is not None else None
            blocks = self._promoter.advance(ticket)
            if blocks is not Progress.READY:
                return blocks
            if resume.part is None or progress is Progress.LOADING:
                return progress or Progress.READY
            wanted = resume.positions[-1]
            if progress is Progress.READY and resume.part.blocks and len(ticket.blocks) == wanted:
                return Progress.READY
            self._fall_back(ticket, resume)

    def close(self, ticket: Ticket) -> None:
        if ticket.resume is not None and ticket.resume.part is not None:
            self._group.close_ticket(ticket.resume.part)
            ticket.resume.part = None

    def release(self, part: Ticket) -> None:
        self._group.close_ticket(part)

    def parts(self, chain: Chain) -> int:
        """The number of leading blocks that the chain shares with others above the disk."""
        return len(self._residency.index.match(chain))

    def take(self, chain: Chain, number: int, fill: Callable[[int], None]) -> bool:
        """Keep a checkpoint after `number` blocks of the chain, unless there is one. `fill` copies
        the state into a slot. False if nothing was kept."""
        link = chain.link(number - 1)
        if chain.private or self._group.index.get(link.keys[0]) is not None:
            return False
        tables = self._group.tables
        block = tables.new_block(link)
        try:
            slot = tables.provide(block)
        except OutOfBlocks:
            return False
        fill(slot)
        tables.release(link, [tables.commit(link, 0, block)], chain.block_size)
        return True

    def _in_memory(self, chain: Chain) -> list[int]:
        """Where memory has checkpoints of the chain: block counts, ascending."""
        get = self._group.index.get
        keys = chain.keys[: prompt_end(chain.num_tokens, chain.block_size)]
        found = [number for number, key in enumerate(keys, 1) if get(key) is not None]
        return [n for n in found if self._group.index.match(chain.link(n - 1))]

    def _take_up(self, ticket: Ticket, resume: Resume) -> None:
        """Ask for the blocks and the checkpoint of the longest position."""
        number = resume.positions[-1]
        self._cut(ticket, number)
        ticket.chain = resume.chain.head(number)
        resume.part = self._group.open(resume.chain.link(number - 1))

    def _fall_back(self, ticket: Ticket, resume: Resume) -> None:
        """A part is gone: try the longest shorter position, or begin from nothing."""
        assert resume.part is not None
        gone = resume.positions.pop()
        ticket.stop = resume.part.stop if len(ticket.blocks) == gone else ticket.stop
        self.close(ticket)
        while resume.positions and resume.positions[-1] > len(ticket.blocks):
            resume.positions.pop()
        if not resume.positions:
            self._cut(ticket, 0)
            ticket.chain = resume.chain.head(0)

    def _cut(self, ticket: Ticket, number: int) -> None:
        for block in ticket.cut(number):
            self._residency.release(block, block.use)
        ticket.num_on_device = min(ticket.num_on_device, len(ticket.blocks))
