"""Working copies of sequences' KV, stored by head, next to each other in one buffer.

The pool is block-first, which suits moving blocks but not reading one layer's keys in sequence. So
each running sequence has a second copy of its KV, in float32:

    pool   [blocks, parts, block_size, Hkv, D]      the original, shared, any dtype
    copy   [parts, Hkv, capacity, D]                one sequence's, filled from the pool

There is one such tensor for each run of parts of one shape (`KvPool.runs`). Most models have a
single run of all layers' keys and values. A copy holds the pool's values, rounded as the pool
rounds.

A copy outlives its sequence until its memory is needed. The next prompt that begins with the same
blocks takes it over, and only the rest is filled. The pool tells which blocks are the same, because
each owner of a slot has a unique number. Engine thread only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.base import pieces
from engine.attention.kv_pool import KvPool
from engine.batch import Span
from engine.hardware import CPU_COPIES_BYTES
from tiers.blocks.lazy_memory import LazyMemory

_CAPACITY_STEP = 256  # a copy's capacity is a multiple of this, in tokens
_MOST_KEPT = 64  # the most copies of ended sequences


@dataclass(slots=True, eq=False)
class WorkingCopy:
    """The KV of positions [0, length), in `size` elements of the buffer from `start` on."""

    start: int
    size: int
    runs: list[torch.Tensor]  # [parts, Hkv, capacity, D]
    length: int = 0
    owners: list[int] = field(default_factory=list)  # owner numbers of its full blocks' slots

    @property
    def capacity(self) -> int:
        return self.runs[0].shape[2]


class WorkingCopies:
    """All copies. Invariant: copies, of running or ended sequences, do not overlap in the
    buffer."""

    def __init__(
        self, kv: KvPool, owners: Sequence[int] = (), *, budget_bytes: int = CPU_COPIES_BYTES
    ) -> None:
        """owners: the number of the owner of each pool slot, never reused. Without it no copy
        outlives its sequence."""
        self._kv = kv
        self._owners = owners
        self._token_items = sum(run[0].numel() for run in kv.runs) // kv.block_size
        self.lazy_memory = _lazy_memory(budget_bytes)
        self._buffer = torch.from_numpy(self.lazy_memory.memory).view(torch.float32)
        self._free = free = FreeRanges(len(self._buffer))
        self.lazy_memory.num_used = lambda: free.end * torch.float32.itemsize
        self._running: dict[int, WorkingCopy] = {}
        self._ended: dict[WorkingCopy, None] = {}  # oldest first

    def open(self, span: Span, busy: set[int]) -> WorkingCopy | None:
        """The span's copy, with every position that is in the pool before this step, and room for
        the span. None if only the sequences in `busy` could give up memory."""
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
        copy.length = standing  # rows left beyond this by a failed step are rewritten
        del copy.owners[standing // self._kv.block_size :]
        return copy

    def finish(self, copy: WorkingCopy, span: Span) -> None:
        """Write the finished step's KV from the copy to the pool's blocks."""
        if span.write_kv:
            self._write(copy, span)
        copy.length = span.start + len(span.tokens)
        if self._owners:
            known, full = len(copy.owners), copy.length // self._kv.block_size
            if known < full:
                copy.owners += [self._owners[slot] for slot in span.block_table[known:full]]

    def forget(self, sequence_id: int) -> None:
        """End the sequence. Its copy stays for the next prompt that begins the same way."""
        copy = self._running.pop(sequence_id, None)
        if copy is None:
            return
        if not copy.owners:
            self._free.give(copy.start, copy.size)
            return
        self._ended[copy] = None
        if len(self._ended) > _MOST_KEPT:
            self._drop_oldest()

    @property
    def uniform(self) -> bool:
        """Whether all parts have one shape, so that `rows` can locate them."""
        return len(self._kv.runs) == 1

    def rows(self, copies: Sequence[WorkingCopy], positions: Sequence[int]) -> "Rows":
        """The buffer rows of the heads of these positions, one position per copy."""
        _, parts, _, heads, dim = self._kv.runs[0].shape
        starts = np.array([copy.start // dim for copy in copies])
        capacities = np.array([copy.capacity for copy in copies])
        head = np.arange(parts * heads).reshape(parts, 1, heads) * capacities[:, None]
        rows = head + (starts + np.array(positions))[:, None]
        usable = len(self._buffer) // dim * dim
        return Rows(
            self._buffer[:usable].view(-1, dim), torch.from_numpy(rows.reshape(parts, -1)).unbind(0)
        )

    @property
    def _usual(self) -> int:
        """The elements that copies of ended sequences may take: a quarter of the budget."""
        return len(self._buffer) // 4

    def _grown(self, span: Span, old: WorkingCopy | None, busy: set[int]) -> WorkingCopy | None:
        """A copy with room for the span and for growth. The contents of `old` are moved into it."""
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
        """The ended sequence's copy that shares the most leading blocks with the span, shortened to
        them. None if no copy saves more blocks than it loses."""
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
                    if gain == len(wanted):  # none can save more
                        break
        if best is None:
            return None
        del self._ended[best]
        del best.owners[_num_shared(best.owners, wanted) :]
        best.length = len(best.owners) * size
        # For layers with a window, it may lack the rows that this prompt reads.
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
        """For each run, its view of the buffer in a copy at `start`."""
        views = []
        for run in self._kv.runs:
            _, parts, _, heads, dim = run.shape
            end = start + parts * heads * capacity * dim
            views.append(self._buffer[start:end].view(parts, heads, capacity, dim))
            start = end
        return views

    def _take(self, size: int, busy: set[int]) -> int | None:
        """Find room for a copy. Copies of ended sequences are dropped before the step waits for
        fresh memory, and before more than a quarter of the budget is touched. Copies of sequences
        that sit this step out are dropped last."""
        touched = self.lazy_memory.num_touched // torch.float32.itemsize
        for limit in (touched, self._usual, len(self._buffer)):
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
        """Move the copies together, because a long prompt needs the free memory in one piece.
        Without a copy, each of its steps takes many times as long (docs/measurements, "Working
        copies")."""
        elements, end = self._buffer.numpy(), 0  # unlike torch, NumPy can copy overlapping ranges
        for copy in sorted(self._running.values(), key=lambda copy: copy.start):
            if copy.start > end:
                elements[end : end + copy.size] = elements[copy.start : copy.start + copy.size]
                copy.start, copy.runs = end, self._views(end, copy.capacity)
            end += copy.size
        self._free.reset(end)

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
        """Copy positions [copy.length, end) from the pool, as far as windows reach."""
        for number, window in enumerate(self._kv.windows):
            first = copy.length if window is None else max(copy.length, end - window)
            self._fill_run(number, copy, block_table, first, end)
        if self._owners:
            full = end // self._kv.block_size
            copy.owners += [self._owners[slot] for slot in block_table[len(copy.owners) : full]]

    def _fill_run(
        self, number: int, copy: WorkingCopy, block_table: Sequence[int], first: int, end: int
    ) -> None:
        """The same for one run of parts and positions [first, end)."""
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
    """The rows of the buffer, [N, D], and for each part the numbers of the rows that a step writes,
    [sequences * Hkv]."""

    buffer: torch.Tensor
    numbers: tuple[torch.Tensor, ...]


class FreeRanges:
    """The free ranges of [0, size). A range is taken at the lowest position where it fits."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranges = [(0, size)]  # sorted, no two adjacent

    def reset(self, first: int) -> None:
        """The elements before `first` are taken from now on, and no others."""
        self._ranges = [(first, self._size)]

    @property
    def end(self) -> int:
        """Nothing is taken from here on. Any thread may ask."""
        for start, end in self._ranges[-1:]:
            if end == self._size:
                return start
        return self._size

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
        joined: list[tuple[int, int]] = []
        for first, end in sorted([*self._ranges, (start, start + size)]):
            if joined and joined[-1][1] == first:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((first, end))
        self._ranges = joined


def _lazy_memory(num_bytes: int) -> LazyMemory:
    """Memory of `num_bytes`, or of half, a quarter and so on, whatever the system grants. Ahead of
    need a quarter of it is touched: see `WorkingCopies._usual`."""
    try:
        return LazyMemory(num_bytes, limit=num_bytes // 4)
    except MemoryError:
        return _lazy_memory(num_bytes // 8 * 4)


def _capacity(num_tokens: int) -> int:
    """The capacity for a sequence of `num_tokens`: an eighth more, so that it is seldom moved."""
    return -(-(num_tokens + num_tokens // 8 + 1) // _CAPACITY_STEP) * _CAPACITY_STEP


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading numbers the two share. Found by bisection, because a prompt may have
    thousands of blocks and is compared with every kept copy."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
