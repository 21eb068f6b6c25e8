"""The device pool: one tensor of blocks that attention reads in place, and the copies in and out.

Engine thread only. On a CPU the "device" is ordinary memory and a copy is a memcpy, done when it
returns. On CUDA copies run on their own streams, and events order them against the compute stream,
so the host never waits. Compute does not wait for a copy in, because nobody uses its blocks before
they have `arrived`. It waits for a copy out only if it writes to the slot for a new owner. Copies
in both directions run beside compute.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch

from tiers.blocks.frames import Frame
from tiers.blocks.layout import BlockLayout, part_views
from tiers.blocks.lazy_memory import LazyMemory
from tiers.blocks.part import Part
from tiers.blocks.places import BlockPlaces
from tiers.errors import CopyFailed


class Copy:
    """A copy in progress between a frame and a slot."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether the bytes have arrived. Until then no thread may use the frame."""
        return self._event is None or self._event.query()


DONE = Copy()
_Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]

ALIGN_BYTES = 64  # where a lesser slot begins
_CHECKED_NUMBERS = 1000


def slot_nbytes(layout: BlockLayout) -> int:
    """Bytes of a whole slot. One that may be cut has room for parts that begin aligned."""
    if layout.num_lesser == 1:
        return layout.nbytes
    return -(-layout.nbytes // (layout.num_lesser * ALIGN_BYTES)) * layout.num_lesser * ALIGN_BYTES


class DevicePool:
    """`num_blocks` slots on `device`, and on a GPU one more, `scratch`. `tensor[slot]` has the
    layout's shape.

    Slots are `places`: if the layout has windows, one may be cut into `num_lesser`. `tensor` has a
    row for each lesser slot, and rows overlap: that of a whole slot extends over the rows after it,
    and of that of a lesser slot only the lasting part belongs to the block. So readers of a block
    table need not know which size a slot has. A node's pool has no slots.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.places = BlockPlaces(num_blocks, layout.num_lesser)
        self.num_lesser = layout.num_lesser
        self.num_slots = num_blocks * self.num_lesser
        self.device = torch.device(device)
        # A GPU's decode graphs write the rows that fill a batch up to a block that is nobody's.
        self.scratch = self.num_slots if self.device.type == "cuda" else None
        self.lazy_memory: LazyMemory | None = None  # a GPU hands out its memory at once
        self.tensor = self._rows()
        self._lasting = layout.lasting_nbytes // layout.torch_dtype.itemsize
        self._parts = [part for layer in part_views(self.tensor, layout.layers) for part in layer]
        # Of each slot a number of its owner, never used again: rows that were read under the same
        # number are still what the slot holds, as far as the owner had written them.
        self.owners = array("q", bytes(8 * self.num_slots))
        self._num_owners = 0
        self._copy: Callable[[_Pairs], None] = _copy_each
        self._down: torch.cuda.Stream | None = None
        self._up: torch.cuda.Stream | None = None
        # Copies under way by the whole slot. Of those in one direction the last ends last.
        self._leaving: dict[int, torch.cuda.Event] = {}  # out of slots
        self._filling: dict[int, torch.cuda.Event] = {}  # and the frames that they go to
        self._arriving: dict[int, torch.cuda.Event] = {}  # into slots
        if self.device.type == "cuda":
            self._down = torch.cuda.Stream(self.device)
            self._up = torch.cuda.Stream(self.device)

    def copy_by(self, copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None]) -> None:
        """On a CPU, let `copy` fill targets from as many sources, both without gaps, if it does so
        here. Where it raises RuntimeError, a copy has failed."""

        def copy_together(pairs: _Pairs) -> None:
            targets, sources = zip(*pairs, strict=True)
            copy([*targets], [*sources])

        numbers = torch.arange(_CHECKED_NUMBERS)
        copied = torch.zeros_like(numbers)
        copy_together([(copied[:-1], numbers[:-1]), (copied[-1:], numbers[-1:])])
        if self.device.type == "cpu" and torch.equal(numbers, copied):
            self._copy = copy_together

    def _rows(self) -> torch.Tensor:
        """The blocks, each of which begins where a lesser slot does, in memory of their own."""
        layout, num_rows = self.layout, self.num_slots + (self.scratch is not None)
        if layout.num_lesser == 1:
            return self._zeros(num_rows * prod(layout.shape)).view(num_rows, *layout.shape)
        stride = slot_nbytes(layout) // layout.torch_dtype.itemsize // layout.num_lesser
        # The last row, too, is followed by as many numbers as a whole block has.
        memory = self._zeros((num_rows + layout.num_lesser - 1) * stride)
        rows = memory.as_strided((num_rows, prod(layout.shape)), (stride, 1))
        return rows if len(layout.shape) == 1 else rows.unflatten(1, layout.shape)

    def _zeros(self, size: int) -> torch.Tensor:
        dtype = self.layout.torch_dtype
        if self.device.type != "cpu":
            return torch.zeros(size, dtype=dtype, device=self.device)
        places, slot_bytes = self.places, slot_nbytes(self.layout)
        self.lazy_memory = LazyMemory(size * dtype.itemsize, lambda: places.num_used * slot_bytes)
        return torch.from_numpy(self.lazy_memory.memory).view(dtype)

    @property
    def num_free(self) -> int:
        return self.places.num_free

    @property
    def num_lesser_free(self) -> int:
        return self.places.num_lesser_free

    def take(self, *, lesser: bool = False) -> int | None:
        """A free slot, or None. Its rows are left over from its last owner. With `lesser`, it may
        have room for a block without its windows alone."""
        slot = self.places.take(lesser=lesser)
        return self.hand_on(slot) if slot is not None else None

    def lessen(self, slot: int) -> int:
        """Cut a whole slot. Its owner has the first part, whose number is the same."""
        self.places.lessen(slot)
        return slot

    def hand_on(self, slot: int) -> int:
        """Passes the slot to a new owner. The last one's rows may still be on their way in or out:
        `copy_in` waits for them on its own stream, and compute only at `settle`."""
        self._num_owners += 1
        self.owners[slot] = self._num_owners
        return slot

    def give(self, slot: int) -> None:
        """Gives a slot back. Nothing may refer to it any more."""
        self.places.give(slot)

    def reuse(self, slot: int, *, lesser: bool = False) -> int | None:
        """A slot for a new owner in place of this one. None: more slots must be given up."""
        to = self.places.reuse(slot, lesser=lesser)
        return self.hand_on(to) if to is not None else None

    def move(self, slot: int, to: int) -> None:
        """Copy the lasting part of a block from one slot to another, in compute order. They have
        the same owner from here on. Raises CopyFailed."""
        self.settle(slot)
        self.settle(to)
        target, source = self._pair(self.tensor[to], self.tensor[slot], Part.LASTING)
        self._put([(target, source)])
        self.owners[to] = self.owners[slot]

    def copy_out(self, slot: int, frame: Frame) -> Copy:
        """Copy a block, or the part that the frame is to have, to a host frame. Its rows must not
        change until `hand_on`. Raises CopyFailed."""
        target, source = self._pair(frame.tensor, self.tensor[slot], frame.part)
        if self._down is None:
            self._put([(target, source)])
            return DONE
        number = self.places.whole_of(slot)
        if (event := self._arriving.get(number)) is not None:
            self._down.wait_event(event)
        copy = self._enqueue(self._down, [(target, source)])
        self._leaving[number] = copy
        self._filling = _under_way(self._filling)
        self._filling[frame.number] = copy
        return Copy(copy)

    def copy_in(
        self, frames: Sequence[Frame], slots: Sequence[int], parts: Sequence[Part] = ()
    ) -> Copy:
        """Copy host frames, or `parts` of them, into slots. Compute may read one when it has
        `arrived`, or after `settle`. Raises CopyFailed."""
        parts = parts or [Part.WHOLE] * len(slots)
        # Made one by one, as they are copied: making those of 2 GB takes a third of the copy.
        pairs = (
            self._pair(self.tensor[slot], frame.tensor, part)
            for frame, slot, part in zip(frames, slots, parts, strict=True)
        )
        if self._up is None or self._down is None:
            self._put(pairs)
            return DONE
        numbers = [self.places.whole_of(slot) for slot in slots]
        for number in numbers:
            if self._leaving and (event := self._leaving.pop(number, None)) is not None:
                self._up.wait_event(event)
        for frame in frames:
            if (event := self._filling.get(frame.number)) is not None:
                self._up.wait_event(event)  # it is still on its way down
        copy = self._enqueue(self._up, pairs)
        self._arriving |= dict.fromkeys(numbers, copy)
        return Copy(copy)

    @property
    def is_arriving(self) -> bool:
        self._arriving = _under_way(self._arriving)
        return bool(self._arriving)

    def arrived(self, slot: int) -> bool:
        """Whether the slot's rows have arrived. Queries the device without waiting."""
        number = self.places.whole_of(slot)
        event = self._arriving.get(number)
        if event is not None and event.query():
            del self._arriving[number]
            return True
        return event is None

    def settle(self, slot: int) -> None:
        """Makes compute wait for the slot's rows, if they are still being copied in, or out for an
        owner before. Call it before compute reads the slot, or writes to it first."""
        number = self.places.whole_of(slot)
        for under_way in (self._arriving, self._leaving):
            if under_way and (event := under_way.pop(number, None)) is not None:
                torch.cuda.current_stream(self.device).wait_event(event)

    def _pair(
        self, target: torch.Tensor, source: torch.Tensor, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of two blocks what is to be copied from one to the other."""
        if part is Part.WHOLE:
            return target, source
        within = slice(self._lasting) if part is Part.LASTING else slice(self._lasting, None)
        return target.view(-1)[within], source.view(-1)[within]

    def copy_rows(self, source: int, target: int, num_rows: int) -> None:
        """Copy the first token rows of a slot to another, in compute order. Raises CopyFailed."""
        self.settle(source)
        self.settle(target)
        if len(self.layout.shape) > 1:
            rows = self.tensor[:, :, :, :num_rows]
            self._put([(rows[target], rows[source])], _copy_each)
            return
        pairs = []
        for part in self._parts:  # a state is copied whole
            count = num_rows if part.shape[1] == self.layout.block_size else part.shape[1]
            pairs.append((part[target, :count], part[source, :count]))
        self._put(pairs, _copy_each)

    def _put(self, pairs: _Pairs, copy: Callable[[_Pairs], None] | None = None) -> None:
        """Copies sources to targets on the current stream."""
        try:
            (copy or self._copy)(pairs)
        except RuntimeError as error:
            raise CopyFailed(f"{self.device} refused to copy a block: {error}") from error

    def _enqueue(self, stream: torch.cuda.Stream, pairs: _Pairs) -> torch.cuda.Event:
        """Copies sources to targets after the work already given to compute. If one is refused,
        waits for those before it, whose slots and frames get other owners."""
        stream.wait_stream(torch.cuda.current_stream(self.device))
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            try:
                self._put(pairs)
            except CopyFailed:
                stream.synchronize()
                raise
            event.record(stream)
        return event


def _copy_each(pairs: _Pairs) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def _under_way(events: dict[int, torch.cuda.Event]) -> dict[int, torch.cuda.Event]:
    return {key: event for key, event in events.items() if not event.query()} if events else events
