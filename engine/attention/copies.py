"""Working copies of sequences' KV, head by head, side by side in one buffer.

The pool is block-first, which suits moving blocks and not reading one layer's keys in a row. So
each running sequence has its KV a second time, in float32:

    pool   [blocks, parts, block_size, Hkv, D]      the truth, shared, any dtype
    copy   [parts, Hkv, capacity, D]                of one sequence, filled from the pool

for each run of parts of one shape (`KvPool.runs`): most models have one, of all layers' keys and
values. A copy holds what the pool holds, rounded as the pool rounds.

A copy stays when its sequence ends, until its memory is needed: the next prompt that begins with
the same blocks takes it over, and only the rest is filled. The pool says which blocks are the same:
each owner of a slot has a number of its own. Engine thread only.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.base import pieces
from engine.attention.kv_pool import KvPool
from engine.batch import Span

_CAPACITY_STEP = 256  # tokens by which a copy's capacity is rounded up
_MOST_KEPT = 64  # copies of ended sequences
DEFAULT_BUDGET_BYTES = 2 << 30


@dataclass(slots=True, eq=False)
class WorkingCopy:
    """KV of positions [0, length), in `size` elements of the buffer from `start`."""

    start: int
    size: int
    runs: list[torch.Tensor]  # [parts, Hkv, capacity, D]
    length: int = 0
    owners: list[int] = field(default_factory=list)  # of the slots of its full blocks

    @property
    def capacity(self) -> int:
        return self.runs[0].shape[2]


class WorkingCopies:
    """All copies. Invariant: those of running and of ended sequences lie apart in the buffer."""

    def __init__(
        self,
        kv: KvPool,
        owners: Sequence[int] = (),
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        """owners: of each slot of the pool the number of its owner, never used twice. Without it
        no copy outlives its sequence."""
        self._kv = kv
        self._owners = owners
        self._token_items = sum(run[0].numel() for run in kv.runs) // kv.block_size
        self._buffer = _reserved(budget_bytes // torch.float32.itemsize)
        self._free = FreeRanges(len(self._buffer))
        self._running: dict[int, WorkingCopy] = {}
        self._ended: dict[WorkingCopy, None] = {}  # the oldest first

    def open(self, span: Span, busy: set[int]) -> WorkingCopy | None:
        """The span's copy, with every position that stands in the pool before this step, and room
        for the span. None where there is no memory but that of the sequences in `busy`."""
        end = span.start + len(span.tokens)
        standing = span.start if span.write_kv else end
        copy = self._running.get(span.sequence_id)
        if copy is None:
            copy = self._match(span, standing)
        if copy is None or copy.capacity < end:
            copy = self._grown(span, copy, busy)
            if copy is None:
                return None
        if copy.length < standing:
            self._fill(copy, span.block_table, standing)
        copy.length = standing  # what a step that failed half-way left beyond is written anew
        del copy.owners[standing // self._kv.block_size :]
        return copy

    def finish(self, copy: WorkingCopy, span: Span) -> None:
        """The step is done: write its KV, which stands in the copy, to the pool's blocks."""
        if span.write_kv:
            self._write(copy, span)
        copy.length = span.start + len(span.tokens)
        if self._owners:
            known, full = len(copy.owners), copy.length // self._kv.block_size
            if known < full:
                copy.owners += [self._owners[slot] for slot in span.block_table[known:full]]

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended; its copy stays for the next prompt that begins as it does."""
        copy = self._running.pop(sequence_id, None)
        if copy is None:
            return
        if not copy.owners:
            self._free.give(copy.start, copy.size)
            return
        self._ended[copy] = None
        if len(self._ended) > _MOST_KEPT:
            self._drop_oldest()

    def warm_up(self, num_tokens: int) -> None:
        """Touch the memory of a copy of `num_tokens`, or as much of it as a quarter of the budget.

        Memory that a virtual machine touches for the first time comes at about 1 GB/s, slower than
        a prefix is copied from the pool (docs/measurements).
        """
        self._buffer[: min(_capacity(num_tokens) * self._token_items, self._usual)].zero_()

    @property
    def uniform(self) -> bool:
        """Whether all parts have one shape, so that `rows` can say where they lie."""
        return len(self._kv.runs) == 1

    def rows(self, copies: Sequence[WorkingCopy], positions: Sequence[int]) -> "Rows":
        """Where the heads of these positions lie, one position of each copy."""
        _, parts, _, heads, dim = self._kv.runs[0].shape
        starts = np.array([copy.start // dim for copy in copies])
        capacities = np.array([copy.capacity for copy in copies])
        head = np.arange(parts * heads).reshape(parts, 1, heads) * capacities[:, None]
        rows = head + (starts + np.array(positions))[:, None]
        usable = len(self._buffer) // dim * dim
        return Rows(
            self._buffer[:usable].view(-1, dim),
            torch.from_numpy(rows.reshape(parts, -1)).unbind(0),
        )

    @property
    def _usual(self) -> int:
        """Elements that copies of ended sequences may take: a quarter of the budget."""
        return len(self._buffer) // 4

    def _grown(self, span: Span, old: WorkingCopy | None, busy: set[int]) -> WorkingCopy | None:
        """A copy with room for the span and what will follow; `old`'s contents move over."""
        end = max(span.start + len(span.tokens), span.num_prompt_tokens)
        copy = self._new(_capacity(end), busy)
        if copy is None:
            self._give_up(span.sequence_id)
            return None
        if old is not None:
            for new, before in zip(copy.runs, old.runs, strict=True):
                new[:, :, : old.length] = before[:, :, : old.length]
            copy.length, copy.owners = old.length, old.owners
            self._free.give(old.start, old.size)
        self._running[span.sequence_id] = copy
        return copy

    def _match(self, span: Span, standing: int) -> WorkingCopy | None:
        """The copy of an ended sequence that begins with most of the blocks that stand, shortened
        to them; None where no copy saves more blocks than it loses."""
        if not self._ended:
            return None
        size, end = self._kv.block_size, max(span.start + len(span.tokens), span.num_prompt_tokens)
        wanted = [self._owners[slot] for slot in span.block_table[: standing // size]]
        best, saved = None, 0
        for copy in self._ended:
            if copy.capacity >= end:
                gain = 2 * _num_shared(copy.owners, wanted) - len(copy.owners)
                if gain > saved:
                    best, saved = copy, gain
        if best is None:
            return None
        del self._ended[best]
        del best.owners[_num_shared(best.owners, wanted) :]
        best.length = len(best.owners) * size
        # Of layers with a window it may lack the rows that this prompt looks at.
        for number, window in enumerate(self._kv.windows):
            if window is not None:
                self._fill_run(number, best, span.block_table, best.length - window, best.length)
        self._running[span.sequence_id] = best
        return best

    def _new(self, capacity: int, busy: set[int]) -> WorkingCopy | None:
        size = capacity * self._token_items
        start = self._take(size, busy)
        if start is None:
            return None
        return WorkingCopy(start, size, self._views(start, capacity))

    def _views(self, start: int, capacity: int) -> list[torch.Tensor]:
        """Of each run the part of the buffer that a copy at `start` has for it."""
        views = []
        for run in self._kv.runs:
            _, parts, _, heads, dim = run.shape
            end = start + parts * heads * capacity * dim
            views.append(self._buffer[start:end].view(parts, heads, capacity, dim))
            start = end
        return views

    def _take(self, size: int, busy: set[int]) -> int | None:
        """Room for a copy. Copies of ended sequences go before more memory is touched than a
        quarter of the budget, and those of sequences that sit this step out go last."""
        for limit in (self._usual, len(self._buffer)):
            if (start := self._make_room(size, limit)) is not None:
                return start
        for sequence_id in [known for known in self._running if known not in busy]:
            if self._free.total >= size:
                break
            self._give_up(sequence_id)
        if self._free.total < size:
            return None
        if (start := self._free.take(size, len(self._buffer))) is None:
            self._close_gaps()
            start = self._free.take(size, len(self._buffer))
        return start

    def _close_gaps(self) -> None:
        """Move the copies together: a long prompt needs what is free in one piece, and without a
        copy each of its steps takes many times as long (docs/measurements, "Working copies")."""
        elements, end = self._buffer.numpy(), 0  # unlike torch, NumPy copies between what overlaps
        for copy in sorted(self._running.values(), key=lambda copy: copy.start):
            if copy.start > end:
                elements[end : end + copy.size] = elements[copy.start : copy.start + copy.size]
                copy.start, copy.runs = end, self._views(end, copy.capacity)
            end += copy.size
        self._free = FreeRanges(len(elements), end)

    def _make_room(self, size: int, limit: int) -> int | None:
        if size > limit:
            return None
        while (start := self._free.take(size, limit)) is None and self._ended:
            self._drop_oldest()
        return start

    def _drop_oldest(self) -> None:
        copy = next(iter(self._ended))
        del self._ended[copy]
        self._free.give(copy.start, copy.size)

    def _give_up(self, sequence_id: int) -> None:
        copy = self._running.pop(sequence_id, None)
        if copy is not None:
            self._free.give(copy.start, copy.size)

    def _fill(self, copy: WorkingCopy, block_table: Sequence[int], end: int) -> None:
        """Bring positions [copy.length, end) over from the pool, as far as windows reach."""
        for number, window in enumerate(self._kv.windows):
            first = copy.length if window is None else max(copy.length, end - window)
            self._fill_run(number, copy, block_table, first, end)
        if self._owners:
            full = end // self._kv.block_size
            copy.owners += [self._owners[slot] for slot in block_table[len(copy.owners) : full]]

    def _fill_run(
        self, number: int, copy: WorkingCopy, block_table: Sequence[int], first: int, end: int
    ) -> None:
        """The same of one run of parts and positions [first, end)."""
        run, to, size = self._kv.runs[number], copy.runs[number], self._kv.block_size
        position = max(0, first)
        while position < end:
            place, row = divmod(position, size)
            count = min(size - row, end - position)
            rows = run[block_table[place], :, row : row + count]  # [parts, n, Hkv, D]
            to[:, :, position : position + count] = rows.transpose(1, 2)
            position += count

    def _write(self, copy: WorkingCopy, span: Span) -> None:
        for offset, count, block, row in pieces(span, self._kv.block_size):
            position = span.start + offset
            for run, rows in zip(self._kv.runs, copy.runs, strict=True):
                there = rows[:, :, position : position + count]  # [parts, Hkv, n, D]
                run[block, :, row : row + count] = there.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the buffer, [N, D], and of each part the numbers of those that a step writes,
    [sequences * Hkv]."""

    buffer: torch.Tensor
    numbers: tuple[torch.Tensor, ...]


class FreeRanges:
    """What is free of [0, size): a range is taken at the lowest place where it fits."""

    def __init__(self, size: int, first: int = 0) -> None:
        """The elements before `first` are taken."""
        self._ranges = [(first, size)]  # sorted, none beside another

    @property
    def total(self) -> int:
        return sum(end - start for start, end in self._ranges)

    def take(self, size: int, limit: int) -> int | None:
        """The start of a range of `size` that ends at or below `limit`, or None."""
        for place, (start, end) in enumerate(self._ranges):
            if start + size > limit:
                return None
            if start + size <= end:
                self._ranges[place : place + 1] = [(start + size, end)] * (start + size < end)
                return start
        return None

    def give(self, start: int, size: int) -> None:
        insort(self._ranges, (start, start + size))
        place = self._ranges.index((start, start + size))
        low, high = max(0, place - 1), place + 2
        joined: list[tuple[int, int]] = []
        for first, end in self._ranges[low:high]:
            if joined and joined[-1][1] == first:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((first, end))
        self._ranges[low:high] = joined


def _reserved(size: int) -> torch.Tensor:
    """So many elements, or as many as the system promises: half, a quarter and so on. Only what was
    touched is in memory, for it comes page by page."""
    try:
        return torch.empty(size, dtype=torch.float32)
    except RuntimeError:
        return _reserved(size // 2)


def _capacity(num_tokens: int) -> int:
    """Room for a sequence of `num_tokens` and an eighth more, so that it is seldom moved."""
    return -(-(num_tokens + num_tokens // 8 + 1) // _CAPACITY_STEP) * _CAPACITY_STEP


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many numbers both begin with. By halves: a prompt may have thousands of blocks, and is
    compared with every copy that was kept."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
