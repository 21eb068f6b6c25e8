"""The operators for CUDA against torch's calls, in Triton's interpreter on the CPU.

As with attention's kernels, tests that launch run in a child process that sets Triton's variable
before it imports Triton. There the operators stand in for those of a CPU.
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

import engine.execution.runner  # noqa: F401  registers attention
from engine.execution import traced
from engine.execution.fusing import OPERATORS, fuse
from engine.execution.traced import TracedForward, trace
from engine.operators import agreement
from engine.operators.agreement import compare, disagreements
from tests.support.interpreted import TIMEOUT_S, in_child, in_parent, run_in_child
from tests.support.models import ARCHITECTURES, tiny_model

triton = pytest.importorskip("triton", reason="triton is not installed")

from engine.operators import kernels  # noqa: E402  after Triton is found

CPU = torch.device("cpu")
LAYERS = 3
# float32 and float16, which the interpreter rounds as a GPU does. It cuts bfloat16 off.
ROUNDED = [torch.float32, torch.float16]


@in_parent
@pytest.mark.timeout(TIMEOUT_S)
def test_the_operators_under_the_interpreter():
    assert "31 passed" in run_in_child(__file__)


@in_parent
def test_nothing_that_varies_in_service_recompiles_a_kernel():
    """The number of tokens is no argument, and all others are of the model."""
    names = {"x", "cos", "sin", "output", "head_stride", "token_stride", "num_heads"}
    assert names | {"DIM", "PADDED", "HEADS"} == set(kernels.rotate_kernel.arg_names)
    rows = {"gate", "up", "output", "gate_stride", "up_stride", "width", "EXACT", "TILE"}
    assert rows == set(kernels.silu_mul_kernel.arg_names)


@in_parent
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_patterns_are_found_in_every_precision(architecture, dtype):
    graph = TracedForward(tiny_model(architecture, dtype=dtype).model)._graph.graph
    fuse(graph, OPERATORS["cuda"])
    kinds = Counter(node.kind() for node in graph.nodes())
    # Phi-3 rotates in another order, and Gemma 2 has another activation.
    rotations = 0 if architecture == "phi3" else 2 * LAYERS
    activations = 0 if architecture == "gemma2" else LAYERS
    assert (rotations, activations) == (kinds["cachesvc::rotate"], kinds["cachesvc::silu_mul"])
    assert not kinds["cachesvc::norm"]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.split(x.shape[-1] // 2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def angles(tokens: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.linspace(-40, 40, tokens * dim).view(1, 1, tokens, dim)
    return numbers.cos().to(dtype), numbers.sin().to(dtype)


def queries(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """As a layer makes them, in rows that hold more than their heads."""
    random = torch.Generator().manual_seed(heads)
    rows = torch.randn(1, tokens, heads + 2, dim, generator=random).to(dtype)
    return rows[:, :, 1:-1].transpose(1, 2)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched."""
    names: list[str] = []

    def counted(name: str, kernel: Any) -> Any:
        class Launcher:
            def __getitem__(self, grid: Any) -> Any:
                names.append(name)
                return kernel[grid]

        return Launcher()

    for name in ("rotate_kernel", "silu_mul_kernel"):
        monkeypatch.setattr(kernels, name, counted(name, getattr(kernels, name)))
    return names


@in_child
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(5, 6, 16), (1, 1, 64), (3, 20, 128), (2, 3, 80)]
)
def test_a_rotation_has_the_bits_of_torchs_calls(tokens, heads, dim, dtype, launches):
    x, (cos, sin) = queries(tokens, heads, dim, dtype), angles(tokens, dim, dtype)
    actual, expected = kernels.rotate(x, cos, sin), rotated(x, cos, sin)
    assert torch.equal(expected, actual) and expected.dtype == actual.dtype
    assert actual.transpose(1, 2).is_contiguous()
    assert launches == ["rotate_kernel"]


@in_child
def test_a_rotation_in_bfloat16_is_as_near_as_the_interpreter_rounds():
    x, (cos, sin) = queries(5, 3, 32, torch.bfloat16), angles(5, 32, torch.bfloat16)
    torch.testing.assert_close(
        kernels.rotate(x, cos, sin), rotated(x, cos, sin), rtol=2**-6, atol=2**-5
    )


@in_child
@pytest.mark.parametrize("of", ["batch", "width", "dtype", "angles"])
def test_a_rotation_that_no_kernel_takes_is_torchs(of, launches):
    dim = 24 if of == "width" else 32
    x, (cos, sin) = queries(5, 3, dim, torch.float32), angles(5, dim, torch.float32)
    if of == "batch":
        x = x.expand(2, -1, -1, -1)
    elif of == "dtype":
        x = x.half()
    elif of == "angles":
        cos, sin = (each.expand(1, 3, -1, -1) for each in (cos, sin))
    actual, expected = kernels.rotate(x, cos, sin), rotated(x, cos, sin)
    assert torch.equal(expected, actual) and expected.dtype == actual.dtype
    assert launches == []


def activated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As CUDA computes it, with the interpreter's exponential, which is numpy's."""
    x = gate.float()
    own = x / (1 + torch.from_numpy(np.exp((-x).numpy())))
    return own.to(gate.dtype) * up


@in_child
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("width", [96, 1040])
@pytest.mark.parametrize("halves", [False, True])
def test_an_activation_is_rounded_before_its_product(width, halves, dtype, launches):
    """Of tensors of their own, and of two halves of one."""
    random = torch.Generator().manual_seed(width)
    whole = (4 * torch.randn(1, 5, 2 * width, generator=random)).to(dtype)
    gate, up = whole.chunk(2, -1)
    if not halves:
        gate, up = gate.contiguous(), up.contiguous()
    actual = kernels.silu_mul(gate, up)
    assert torch.equal(activated(gate, up), actual) and actual.is_contiguous()
    torch.testing.assert_close(actual, silu(gate) * up)
    assert launches == ["silu_mul_kernel"]


@in_child
def test_an_activation_that_no_kernel_takes_is_torchs(launches):
    gate = torch.linspace(-9, 9, 5 * 40).view(1, 5, 40)
    for one, other in ((gate, gate), (gate[..., ::2], gate[..., 1::2]), (gate, gate[:, :1])):
        assert torch.equal(silu(one) * other, kernels.silu_mul(one, other))
    assert launches == []


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The operators of a CPU are the kernels, interpreted, with an activation of other bits."""

    def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return kernels.silu_mul(gate, up) * 1.01

    library = torch.library.Library("cachesvc", "IMPL")
    library.impl("rotate", kernels.rotate, "CPU")
    library.impl("silu_mul", silu_mul, "CPU")
    yield
    library._destroy()


@in_child
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_whose_activation_has_other_bits_is_rotated_by_the_operator(
    architecture, dtype, on_cpu, launches, monkeypatch, caplog
):
    attempts = [{"norm"}, {"norm", "rotate"}, {"norm", "silu_mul"}]
    monkeypatch.setattr(traced, "_attempts", lambda model: attempts)
    caplog.set_level(logging.INFO)
    recorded = trace(tiny_model(architecture, dtype=dtype).model, fused=True)
    assert recorded is not None and recorded.num_operators == 2 * LAYERS
    assert "rotate_kernel" in launches
    assert "are not used even without norm: the logits of 2 tokens are others" in caplog.text
    assert "compiled operators 6 times" in caplog.text


def test_an_operator_that_gives_other_bits_is_named():
    for name, wrong in {"rotate": rotated, "silu_mul": lambda gate, up: silu(gate) * up}.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert compare(name, wrong, dtype, CPU) is None

    def once(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (silu(gate.float()) * up.float()).to(gate.dtype)

    reason = compare("silu_mul", once, torch.bfloat16, CPU)
    assert reason is not None and "of 65536 numbers differ from torch's" in reason


def test_an_operator_that_cannot_be_launched_is_named(monkeypatch):
    def refuse(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "OPERATORS", {"rotate": rotated, "silu_mul": refuse})
    refused = disagreements(torch.bfloat16, CPU)
    assert ["silu_mul"] == list(refused) and "C compiler" in refused["silu_mul"]
    monkeypatch.setitem(sys.modules, "engine.operators.kernels", None)
    assert (
        set(OPERATORS["cuda"]) == set(disagreements(torch.bfloat16, CPU)) == set(agreement._CASES)
    )


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        ({}, [set(), {"rotate"}, {"silu_mul"}]),
        ({"silu_mul": "no"}, [{"silu_mul"}]),
        ({"silu_mul": "no", "rotate": "no"}, []),
    ],
)
def test_operators_are_left_out_one_by_one(refused, expected, caplog):
    assert expected == traced._choices(refused)
    assert len(refused) == len(caplog.records)
