"""The device pool: one tensor of blocks that attention reads in place, and the copies in and out.

Engine thread only. On a CPU the "device" is ordinary memory and a copy is a memcpy, done when it
returns. On CUDA copies run on their own streams; events order them against the compute stream, so
the host never waits: a slot may be handed on as soon as its copy out was issued.
"""

from collections.abc import Sequence

import torch

from tiers.block import BlockLayout
from tiers.errors import ConfigurationError
from tiers.frames import Frame


class Copy:
    """A copy under way between a frame and a slot."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether the bytes have arrived; the frame must not be touched by a thread before."""
        return self._event is None or self._event.query()


DONE = Copy()


class DevicePool:
    """`[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]` on `device`.

    Invariant: every slot is either free here or owned by exactly one `Block`.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, device: str = "cpu") -> None:
        if num_blocks < 2:
            raise ConfigurationError(
                f"the device cache must hold at least two blocks of {layout.nbytes} bytes; "
                f"raise --device-cache or lower --block-size"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.tensor = torch.zeros(
            (num_blocks, *layout.shape), dtype=layout.torch_dtype, device=self.device
        )
        self._free = list(reversed(range(num_blocks)))
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if self.device.type == "cuda":
            self._streams = (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))

    def touch(self, max_bytes: int) -> None:
        """Let the system hand over the memory of the slots that are taken first."""
        assert self.num_free == self.num_blocks
        self.tensor[: max_bytes // self.layout.nbytes].zero_()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, or None; its rows are whatever its last owner left."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Give a slot back; nothing may refer to it any more."""
        assert len(self._free) < self.num_blocks, "a slot was given back twice"
        self._free.append(slot)

    def copy_out(self, slot: int, frame: Frame) -> Copy:
        """Copy a block to a host frame; later work on the compute stream may overwrite the slot."""
        if self._streams is None:
            frame.tensor.copy_(self.tensor[slot])
            return DONE
        return self._enqueue(self._streams[0], frame.tensor, self.tensor[slot])

    def copy_in(self, frames: Sequence[Frame], slots: Sequence[int]) -> Copy:
        """Copy host frames into slots; later work on the compute stream sees them."""
        if self._streams is None:
            for frame, slot in zip(frames, slots, strict=True):
                self.tensor[slot].copy_(frame.tensor)
            return DONE
        copy = DONE
        for frame, slot in zip(frames, slots, strict=True):
            copy = self._enqueue(self._streams[1], self.tensor[slot], frame.tensor)
        return copy

    def copy_rows(self, source: int, target: int, num_rows: int) -> None:
        """Copy the first `num_rows` token rows of one slot to another, in compute order."""
        self.tensor[target, :, :, :num_rows].copy_(self.tensor[source, :, :, :num_rows])

    def _enqueue(
        self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor
    ) -> Copy:
        compute = torch.cuda.current_stream(self.device)
        stream.wait_stream(compute)
        for other in self._streams or ():
            if other is not stream:
                stream.wait_stream(other)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        compute.wait_event(event)
        return Copy(event)
