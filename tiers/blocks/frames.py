"""Host frames: the memory in which every copy between tiers meets.

A `FrameArena` is one allocation of whole-block frames, pinned if blocks go to a GPU. The engine
thread takes frames and gives them back. Reader and writer threads only fill or read the frames
passed to them.
"""

import logging
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tiers.blocks.layout import BlockLayout
from tiers.blocks.lazy_memory import AHEAD_BYTES, PAGE_BYTES, LazyMemory
from tiers.blocks.numa import cpus_beside, running_on
from tiers.blocks.part import Part
from tiers.blocks.places import BlockPlaces
from tiers.errors import ConfigurationError

logger = logging.getLogger(__name__)

PIN_BYTES = 1 << 30  # registered in one call


class Arena(Protocol):
    """Frames to take and to give back: private memory, or memory that clients share. One that
    inherits this cuts no frames into lesser ones. `stride` is the bytes from one to the next."""

    stride: int
    num_frames: int
    num_lesser: int = 1

    def tensor(self, number: int) -> torch.Tensor: ...

    def buffer(self, number: int) -> memoryview: ...

    def is_lesser(self, number: int) -> bool:
        """Whether a frame that is taken has room for a block without its windows alone."""
        return False

    @property
    def num_lesser_free(self) -> int:
        """Lesser frames that can be taken without cutting one."""
        return 0

    @property
    def num_free(self) -> int: ...

    @property
    def num_taken(self) -> int:
        """How many frames, of either size, have an owner."""

    def take(self, *, lesser: bool = False) -> "Frame | None":
        """A free frame, or None. Its bytes are left over from its last holder. With `lesser`, it
        may have room for a block without its windows alone."""

    def give(self, frame: "Frame") -> None:
        """Give a frame back. The caller must not use it again."""

    def reuse(self, frame: "Frame", *, lesser: bool = False) -> "Frame | None":
        """A frame for a new owner, in place of this one. None: more frames must be given up."""

    def can_reuse(self, frame: "Frame") -> bool:
        """Whether it would help to give up this frame."""
        return True

    def lessen(self, frame: "Frame") -> "Frame":
        """Cut a whole frame. Its owner has the first part, with the same bytes."""
        raise AssertionError(f"frame {frame.number} is of an arena that cuts none")

    def move(self, frame: "Frame", to: "Frame") -> None:
        """Copy a block without its windows from one frame to another."""
        raise AssertionError(f"frame {frame.number} is of an arena that cuts none")


class Frame:
    """One block's worth of host memory. The holder of the frame owns its bytes.

    It is a number and its memory. A view takes 700 bytes and a microsecond, and of millions of
    frames only a few are used at a time. `part` is the part of its block that it holds or, during a
    load, will hold.
    """

    __slots__ = ("memory", "number", "part")

    def __init__(self, memory: Arena, number: int) -> None:
        self.memory = memory
        self.number = number
        self.vacate()

    def vacate(self) -> None:
        """Its block has left it."""
        self.part = Part.LASTING if self.is_lesser else Part.WHOLE

    @property
    def is_lesser(self) -> bool:
        return self.memory.is_lesser(self.number)

    @property
    def tensor(self) -> torch.Tensor:
        """The frame with the layout's shape and dtype; a new view each time."""
        return self.memory.tensor(self.number)

    @property
    def buffer(self) -> memoryview:
        """The same memory as writable bytes, for code without torch."""
        return self.memory.buffer(self.number)


def frame_stride(layout: BlockLayout, device: str = "cpu") -> int:
    """Bytes from one frame to the next. For a GPU whole pages: memory is registered by pages, and
    a copy must not lie across two registrations."""
    if torch.device(device).type != "cuda":
        return layout.nbytes
    return -(-layout.nbytes // PAGE_BYTES) * PAGE_BYTES


class FrameArena(Arena):
    """`num_frames` frames in one allocation, which are `places`: if the layout has windows, one may
    be cut into `num_lesser`. Invariant: a frame for a GPU lies wholly in one registration, or in
    none."""

    def __init__(self, layout: BlockLayout, num_frames: int, device: str = "cpu") -> None:
        if num_frames < 1:
            raise ConfigurationError(
                f"the host cache must hold at least one block of {layout.nbytes} bytes; "
                f"raise --host-cache"
            )
        self.layout = layout
        self.num_frames = num_frames
        self.stride = frame_stride(layout, device)
        self.places = places = BlockPlaces(num_frames, layout.num_lesser)
        stride = self.stride
        self.lazy_memory = LazyMemory(
            num_frames * stride, lambda: places.num_used * stride, at_start=AHEAD_BYTES
        )
        memory = self.lazy_memory.memory
        self.num_pinned_bytes = 0
        if torch.device(device).type == "cuda":
            cudart: Any = torch.cuda.cudart()
            with running_on(cpus_beside(pci_address(device))):  # pinning touches it first
                self.num_pinned_bytes = pin(memory, cudart, self.stride)
            release = weakref.finalize(
                self, _unpin, memory, self.num_pinned_bytes, cudart, self.stride
            )
            release.atexit = False  # the driver releases a process's memory by itself
            if self.num_pinned_bytes < memory.nbytes:
                clear_error(device)
        self._rows = torch.from_numpy(memory).view(num_frames, self.stride)
        whole = self._rows[:, : layout.nbytes].view(layout.torch_dtype)
        self._whole = whole.view(num_frames, *layout.shape)
        self._nbytes, self._lasting_nbytes = layout.nbytes, layout.lasting_nbytes
        self._bytes: memoryview = memory.data
        self.num_lesser = layout.num_lesser

    @property
    def num_free(self) -> int:
        return self.places.num_free

    @property
    def num_taken(self) -> int:
        return self.places.num_taken

    @property
    def num_lesser_free(self) -> int:
        return self.places.num_lesser_free

    def is_lesser(self, number: int) -> bool:
        return self.places.is_lesser(number)

    def take(self, *, lesser: bool = False) -> Frame | None:
        number = self.places.take(lesser=lesser)
        return Frame(self, number) if number is not None else None

    def give(self, frame: Frame) -> None:
        self.places.give(frame.number)

    def reuse(self, frame: Frame, *, lesser: bool = False) -> Frame | None:
        number = self.places.reuse(frame.number, lesser=lesser)
        if number is None:
            return None
        frame.number = number
        frame.vacate()
        return frame

    def lessen(self, frame: Frame) -> Frame:
        self.places.lessen(frame.number)
        frame.part = Part.LASTING
        return frame

    def move(self, frame: Frame, to: Frame) -> None:
        nbytes = self.layout.lasting_nbytes
        to.buffer[:nbytes] = frame.buffer[:nbytes]
        to.part = Part.LASTING

    def tensor(self, number: int) -> torch.Tensor:
        """The memory of a frame. That of a lesser one is flat."""
        place, part = divmod(number, self.num_lesser)
        if self.is_lesser(number):
            nbytes = self._lasting_nbytes
            row = self._rows[place, part * nbytes : (part + 1) * nbytes]
            return row.view(self.layout.torch_dtype)
        return self._whole[place]

    def buffer(self, number: int) -> memoryview:
        place, part = divmod(number, self.num_lesser)
        nbytes = self._lasting_nbytes if self.is_lesser(number) else self._nbytes
        start = place * self.stride + part * nbytes
        return self._bytes[start : start + nbytes]


def pin(memory: NDArray[np.uint8], cudart: Any, stride: int = PAGE_BYTES) -> int:
    """Pins memory for GPU copies, piece by piece. Returns the number of leading bytes pinned.

    The memory begins on a page. A piece is some frames, each `stride` bytes and so whole pages: a
    page can be registered only once, and a copy across two registrations is an invalid argument.

    torch's own pinned memory is rounded up to a power of two: an arena of 80 GiB would pin 128.
    Memory that the system refuses to pin (`ulimit -l`, a container's limit) is copied more slowly.
    """
    pinned = 0
    for address, num_bytes in _pieces(memory, stride):
        error = cudart.cudaHostRegister(address, num_bytes, 0)
        if int(error) != 0:
            logger.warning(
                f"{pinned >> 20} of {memory.nbytes >> 20} MiB of host cache are locked for the "
                f"GPU, then CUDA said {error}; copies of the rest are slow: raise the limit on "
                f"locked memory or lower --host-cache"
            )
            break
        pinned += num_bytes
    return pinned


def pci_address(device: str | torch.device) -> str:
    """A GPU's address, as the system names its devices. Empty if torch does not tell it."""
    try:
        about: Any = torch.cuda.get_device_properties(device)
        return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    except (AssertionError, AttributeError, RuntimeError):  # no CUDA, or an older torch
        return ""


def clear_error(device: str) -> None:
    """Takes the error that a refused registration left behind. CUDA keeps it for the next launch,
    which would fail in its place."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _unpin(memory: NDArray[np.uint8], num_bytes: int, cudart: Any, stride: int) -> None:
    for address, _ in _pieces(memory[:num_bytes], stride):
        cudart.cudaHostUnregister(address)


def _pieces(memory: NDArray[np.uint8], stride: int) -> Iterator[tuple[int, int]]:
    begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    assert begin % PAGE_BYTES == stride % PAGE_BYTES == 0, (begin, stride)
    piece = max(1, PIN_BYTES // stride) * stride
    while begin < end:
        yield begin, min(piece, end - begin)
        begin += piece
