"""The operators `rotate` and `silu_mul` on CUDA, by Triton kernels, bit for bit as torch's calls.

Each number is rounded after each step, as by a call of its own, and no product is contracted with a
sum. What a kernel does not take is computed by torch's calls. The schemas are in `library`, which
also loads the operators of a CPU: either may come first. Imported only with a CUDA device, or under
Triton's interpreter in tests. Nothing here waits for the device.
"""
# ruff: noqa: N803  compile-time arguments are written as constants, as in Triton's own kernels

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu
from triton.language.extra import libdevice

import engine.operators.library  # noqa: F401  defines the operators

_TILE = 1024  # numbers of an activation that a program takes, and pairs of a rotation at most
_ALIGNED = 16  # numbers of which strides and widths are multiples, so that one form is compiled
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=("num_heads",))  # type: ignore[untyped-decorator]
def rotate_kernel(  # type: ignore[no-untyped-def]
    x, cos, sin, output, head_stride, token_stride, num_heads,
    DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program rotates HEADS heads of a token. x: [H, T, DIM]; cos, sin: [T, DIM]; output:
    [T, H, DIM]. PADDED is a power of two, and at least half of DIM."""
    half: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    inside = column < half
    there = (head < num_heads) & inside
    taken = x + token * token_stride + head * head_stride + column
    first = tl.load(taken, mask=there, other=0.0)
    second = tl.load(taken + half, mask=there, other=0.0)
    angle = token * DIM + column
    given = output + (token * num_heads + head) * DIM + column
    straight = _product(first, tl.load(cos + angle, mask=inside, other=0.0))
    across = _product(second, tl.load(sin + angle, mask=inside, other=0.0))
    # Of the negated half: what is subtracted has the bits of what is negated and added.
    tl.store(given, (straight - across).to(first.dtype), mask=there)
    straight = _product(second, tl.load(cos + half + angle, mask=inside, other=0.0))
    across = _product(first, tl.load(sin + half + angle, mask=inside, other=0.0))
    tl.store(given + half, (straight + across).to(first.dtype), mask=there)


@triton.jit
def _product(a, b):  # type: ignore[no-untyped-def]
    """In float32, rounded as a tensor of their dtype has it."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate, up, output, gate_stride, up_stride, width, EXACT: tl.constexpr, TILE: tl.constexpr
):
    """A program activates a tile of one row. gate, up, output: [N, width]. EXACT takes CUDA's own
    exponential, which the interpreter lacks. Triton's is an approximation."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = column < width
    rounded = tl.load(gate + row * gate_stride + column, mask=there, other=0.0)
    x = rounded.to(tl.float32)
    power = libdevice.exp(-x) if EXACT else tl.exp(-x)
    activated = tl.div_rn(x, 1.0 + power).to(rounded.dtype)
    factor = tl.load(up + row * up_stride + column, mask=there, other=0.0)
    product = activated.to(tl.float32) * factor.to(tl.float32)
    tl.store(output + row * width + column, product.to(rounded.dtype), mask=there)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotation of positions: x * cos + half(x) * sin, where half(x) is the second half of x,
    negated, and then the first. x: [1, H, T, D]; cos, sin: [1, 1, T, D], for a kernel."""
    if not _suits_rotation(x, cos, sin):
        first, second = x.split(x.shape[-1] // 2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin
    _, heads, tokens, dim = x.shape
    output = x.new_empty(1, tokens, heads, dim)
    padded = triton.next_power_of_2(dim // 2)
    tile = min(triton.next_power_of_2(heads), max(1, _TILE // padded))
    rotate_kernel[tokens, triton.cdiv(heads, tile)](
        x,
        cos,
        sin,
        output,
        x.stride(1),
        x.stride(2),
        heads,
        DIM=dim,
        PADDED=padded,
        HEADS=tile,
        enable_fp_fusion=False,
    )
    return output.transpose(1, 2)


def _suits_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return (
        x.dim() == 4
        and x.shape[0] == 1
        and x.stride(3) == 1
        and not (x.shape[3] | x.stride(1) | x.stride(2)) % _ALIGNED
        and x.dtype in _DTYPES
        and all(
            each.dtype == x.dtype
            and each.shape == (1, 1, *x.shape[2:])
            and each.is_contiguous()
            and each.device == x.device
            for each in (cos, sin)
        )
    )


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. gate, up: [..., T, D] of one size, for a kernel."""
    strides = _row_stride(gate), _row_stride(up)
    if gate.shape != up.shape or gate.dtype != up.dtype or None in strides:
        return silu(gate) * up
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = gate.shape[-1]
    silu_mul_kernel[gate.numel() // width, triton.cdiv(width, _TILE)](
        gate,
        up,
        output,
        *strides,
        width,
        EXACT=gate.is_cuda,
        TILE=_TILE,
        enable_fp_fusion=False,
    )
    return output


def _row_stride(x: torch.Tensor) -> int | None:
    """The distance of a kernel's rows. None: it does not take them."""
    if x.dim() < 2 or not x.numel() or x.dtype not in _DTYPES or x.stride(-1) != 1:
        return None
    stride = x.stride(-2)
    apart = x.numel() != x.shape[-2] * x.shape[-1] and not x.is_contiguous()
    return None if apart or (stride | x.shape[-1]) % _ALIGNED else stride


OPERATORS: dict[str, Callable[..., torch.Tensor]] = {"rotate": rotate, "silu_mul": silu_mul}
_library = torch.library.Library("cachesvc", "IMPL")
for _name, _operator in OPERATORS.items():
    _library.impl(_name, _operator, "CUDA")
