"""Whether the operators on CUDA give the bits of torch's calls on this machine.

Another build of torch or of Triton could round otherwise, and where Triton has no compiler nothing
can be launched. A start asks before it records a forward with them (`engine.execution.traced`).
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import silu

Operator = Callable[..., torch.Tensor]

_SAMPLES = 1 << 20  # float32 gates that are compared; of a half precision, all there are
_SHAPE = (1, 37, 8, 128)  # tokens and heads of the rotation
_ROW = 1024


@torch.inference_mode()
def disagreements(dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """The operators that are not to be used for `dtype`, with the reasons."""
    try:
        from engine.operators.kernels import OPERATORS
    except ImportError as error:
        return dict.fromkeys(_CASES, f"there is no Triton here: {error}")
    compared = {name: partial(compare, name, OPERATORS[name], dtype, device) for name in _CASES}
    return {name: reason for name, ask in compared.items() if (reason := ask()) is not None}


def compare(name: str, operator: Operator, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `operator` cannot take the place of torch's calls. None if it gives their bits."""
    try:
        for given, expected in _CASES[name](dtype, device):
            actual = operator(*given)
            bits = torch.int16 if dtype.itemsize == 2 else torch.int32
            unlike = actual.view(bits) != expected.view(bits)
            if number := int((unlike & ~(actual.isnan() & expected.isnan())).sum()):
                return f"{number} of {expected.numel()} numbers differ from torch's"
    except Exception as error:  # noqa: BLE001 - Triton's compiler and its driver raise anything
        return f"it cannot be launched: {error!r}"
    return None


_Case = tuple[tuple[torch.Tensor, ...], torch.Tensor]


def _rotations(dtype: torch.dtype, device: torch.device) -> Iterator[_Case]:
    """Queries as their layer stores them."""
    random = torch.Generator().manual_seed(5)
    _, tokens, _, dim = _SHAPE
    x = torch.randn(_SHAPE, generator=random).to(device, dtype).transpose(1, 2)
    angles = 9 * torch.randn(1, 1, tokens, dim, generator=random).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = x.split(dim // 2, -1)
    yield (x, cos, sin), x * cos + torch.cat((-second, first), -1) * sin


def _activations(dtype: torch.dtype, device: torch.device) -> Iterator[_Case]:
    """Every gate by one, or a sample of each size, and gates by factors."""
    random = torch.Generator().manual_seed(6)
    if dtype.itemsize == 2:
        gates = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short().view(dtype)
    else:
        numbers = torch.randn(_SAMPLES, generator=random)
        gates = numbers * torch.logspace(-30, 3, _SAMPLES)
    gate = gates.to(device).view(1, -1, _ROW)
    factor = torch.randn(gate.shape, generator=random).to(device, dtype)
    for up in (torch.ones_like(gate), factor):
        yield (gate, up), silu(gate) * up


_CASES: dict[str, Callable[[torch.dtype, torch.device], Iterator[_Case]]] = {
    "rotate": _rotations,
    "silu_mul": _activations,
}
