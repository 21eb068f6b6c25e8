"""Whether the functions that a model applies to single numbers depend on the rows beside.

torch divides the numbers of a step evenly among its threads. It computes the last of each share, up
to 63, by other functions than the rest, and SiLU, GELU and the sigmoid have other bits there. So a
row's bits may depend on where it stands, as soon as rows are no multiples of torch's vectors or
threads divide one. A forward is watched, which calls the gates of layers, of heads and of inputs by
layer alike. Used once, by the thread that loads the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ROWS = (1, 2, 3, 5, 7, 11, 23, 37, 61, 129, 511, 512, 2047)  # of steps that are tried
_MOST = 1 << 23  # numbers of such a step
_VECTORS = 64  # numbers that end where torch's vectors do
_PIECE = 1 << 15  # numbers that torch leaves to one thread, and a multiple of its vectors
_SAMPLES = 4 * _PIECE  # float32 numbers that are tried; of a half precision, all there are
# Their bits do not depend on how they are computed.
_EXACT = frozenset({"abs", "add", "clamp", "clone", "div", "mul", "neg", "relu", "sqrt", "sub"})


@dataclass(frozen=True, slots=True)
class Call:
    """A function of single numbers, and its input, whose dimension `rows` is the step's tokens."""

    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int

    @property
    def width(self) -> int:
        """How many numbers of a row it takes."""
        return torch.Size(self.shape).numel() // self.shape[self.rows]

    def depends_on_rows(self) -> bool:
        """Whether a row has other bits beside some number of others than alone."""
        counts = [count for count in _ROWS if count * self.width <= _MOST]
        for number in self._telling_numbers():
            alone, *beside = (self._of_rows(number, count) for count in counts)
            if not all(torch.equal(rows, alone.expand_as(rows)) for rows in beside):
                return True
        return False

    def _telling_numbers(self) -> Iterator[float]:
        """Numbers of which vectors have other bits than what computes the last ones. torch may have
        other vectors for numbers without gaps than for rows that lie apart: up to one for each."""
        for pieces in (_numbers(self.dtype), _numbers(self.dtype).view(-1, 2, _VECTORS)[:, 0]):
            for piece in pieces.split(_PIECE // pieces[0].numel()):
                numbers = piece.flatten().clone()
                others = self._of(numbers.repeat_interleave(2)[::2])  # these are in no vector
                vectors = self._of(piece).flatten()
                unlike = vectors.ne(others) & vectors.isfinite() & others.isfinite()
                if unlike.any():
                    yield float(numbers[unlike][0])
                    break

    def _of_rows(self, number: float, count: int) -> torch.Tensor:
        """The function of this number, [count, width], from rows laid out as in the forward."""
        tokens, step = self.shape[self.rows], self.strides[self.rows]
        shape = [*self.shape]
        shape[self.rows] = count
        strides = [each * count // tokens if each > step else each for each in self.strides]
        length = 1 + sum((size - 1) * each for size, each in zip(shape, strides, strict=True))
        numbers = torch.full((length,), number, dtype=self.dtype).as_strided(shape, strides)
        return self._of(numbers).movedim(self.rows, 0).reshape(count, -1)

    def _of(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.function(numbers, *self.arguments, **self.named)


class Watch(TorchDispatchMode):
    """Notes the functions of single numbers, but the exact ones, that a forward of `num_tokens`
    tokens calls while it is entered."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if torch.Tag.pointwise in function.tags:
            self._note(function, args, named)
        return function(*args, **named)

    def _note(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [each for each in (*args, *named.values()) if isinstance(each, torch.Tensor)]
        name = function.overloadpacket.__name__.rstrip("_")
        if len(tensors) != 1 or tensors[0] is not args[0] or name in _EXACT:
            return
        shape, strides = tuple(args[0].shape), args[0].stride()
        if args[0].is_floating_point() and self._num_tokens in shape:
            rows = shape.index(self._num_tokens)
            call = Call(function, args[1:], named, args[0].dtype, shape, strides, rows)
            if call not in self.calls:
                self.calls.append(call)


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short().view(dtype)
    return 3 * torch.randn(_SAMPLES, generator=torch.Generator().manual_seed(1)).to(dtype)
