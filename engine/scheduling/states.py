"""Which recurrent states of running sequences are kept as checkpoints, and where others resume.

The scheduler notes here what the runner is to do with its states. The engine has it done in this
order, after every step and before the next:

    keep: checkpoints, twins ─► forget those that left ─► resume from checkpoints

Engine thread only.
"""

from functools import partial
from typing import Protocol

from engine.scheduling.sequence import Sequence
from tiers.blocks.chain import Chain
from tiers.cache import TieredCache
from tiers.checkpoints import Checkpoints
from tiers.policy.checkpoints import keeps_stop, positions, worth_blocks
from tiers.transfer.ticket import Ticket


class StateRunner(Protocol):
    """What is asked of the runner; see `engine.execution.runner`."""

    def fork(self, sequence_id: int, twin_id: int) -> None: ...

    def holds(self, sequence_id: int, position: int) -> bool: ...

    def save(self, sequence_id: int, position: int, slot: int) -> None: ...

    def resume(self, sequence_id: int, position: int, slot: int) -> None: ...


class StatePlans:
    """The wishes of running sequences, and what is to be done. Positions are block counts."""

    def __init__(self, cache: TieredCache, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        layout = cache.layout
        self._block_size = layout.block_size
        self._worth = worth_blocks(layout.checkpoint.nbytes, layout.nbytes)
        self._wanted: dict[int, set[int]] = {}  # by sequence
        self._reached: list[tuple[int, Chain, int]] = []
        self._forked: list[tuple[int, int]] = []
        self._resumed: dict[int, tuple[int, Ticket]] = {}

    def begin(self, sequence: Sequence, ticket: Ticket) -> None:
        """A sequence begins from the blocks of its ticket, whose checkpoint is kept until it is
        read."""
        if sequence.chain.private:
            return
        start = len(ticket.blocks)
        self._wanted[sequence.sequence_id] = positions(
            start,
            sequence.num_tokens,
            self._block_size,
            worth=self._worth,
            parts=self._checkpoints.parts(sequence.chain),
            keeps=sequence.request.keeps,
        )
        if start and ticket.resume is not None and ticket.resume.part is not None:
            self._resumed[sequence.sequence_id] = start, ticket.resume.part
            ticket.resume.part = None

    def chunk_end(self, sequence: Sequence, start: int, end: int) -> int:
        """Where a chunk ends that may go to `end`: at the first checkpoint on its way."""
        wanted = self._wanted.get(sequence.sequence_id, ())
        borders = [number * self._block_size for number in wanted]
        return min([end, *(border for border in borders if border > start)])

    def computed(self, sequence: Sequence, end: int) -> None:
        """A sequence was computed up to position `end`."""
        number, rest = divmod(end, self._block_size)
        wanted = self._wanted.get(sequence.sequence_id)
        if not rest and wanted and number in wanted:
            wanted.discard(number)
            self._reached.append((sequence.sequence_id, sequence.chain, number))

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        self._forked.append((sequence.sequence_id, twin.sequence_id))

    def leave(self, sequence: Sequence, *, returns: bool) -> None:
        """A sequence stops running. It may return and resume from its last whole block; else its
        next turn may, if that pays."""
        self._wanted.pop(sequence.sequence_id, None)
        unread = self._resumed.pop(sequence.sequence_id, None)
        if unread is not None:
            self._checkpoints.release(unread[1])
            return
        size = self._block_size
        number = sequence.num_standing // size
        ends = keeps_stop(number, sequence.num_prompt, size, worth=self._worth)
        if number and (returns or ends):
            self._reached.append((sequence.sequence_id, sequence.chain, number))

    def keep(self, runner: StateRunner) -> None:
        """Take the checkpoints that were reached, and let twins have their states."""
        for sequence_id, chain, number in self._reached:
            position = number * self._block_size
            if runner.holds(sequence_id, position):
                save = partial(runner.save, sequence_id, position)
                self._checkpoints.take(chain, number, save)
        self._reached.clear()
        for sequence_id, twin_id in self._forked:
            runner.fork(sequence_id, twin_id)
        self._forked.clear()

    def resume(self, runner: StateRunner) -> None:
        """Give the states of checkpoints to the sequences that begin."""
        for sequence_id, (number, part) in self._resumed.items():
            [block] = part.blocks
            assert block.slot is not None, block
            runner.resume(sequence_id, number * self._block_size, block.slot)
            self._checkpoints.release(part)
        self._resumed.clear()
