"""A start finds which functions of single numbers depend on the rows beside, of whatever width."""

import pytest
import torch
from torch.nn import functional

from engine.models.elementwise import Call, Watch
from engine.models.probe import PROBE_TOKENS

with_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="without vectors all numbers are computed alike",
)
pytestmark = with_vectors


def gates(width: int, dtype: torch.dtype = torch.float32, *, stride: int | None = None) -> Call:
    """GELU of rows of `width` numbers, which lie `stride` apart."""
    step = stride or width
    shape, strides = (1, PROBE_TOKENS, width), (PROBE_TOKENS * step, step, 1)
    return Call(torch.ops.aten.gelu.default, (), {"approximate": "tanh"}, dtype, shape, strides, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "num_threads", "depends"),
    [
        *((4, 1, True), (12, 1, True), (12, 3, True)),
        *((64, 1, False), (256, 2, False), (256, 3, True), (1536, 3, False), (8960, 3, True)),
    ],
)
def test_rows_depend_on_each_other_where_shares_end_within_vectors(
    width, num_threads, depends, dtype, threads
):
    threads(num_threads)
    assert depends is gates(width, dtype).depends_on_rows()


def test_rows_that_lie_apart_end_alone_until_threads_divide_them(threads):
    """As the halves of a product of both: torch computes the last numbers of each by themselves."""
    for num_threads, depends in ((1, False), (3, True)):
        threads(num_threads)
        assert depends is gates(1000, stride=2000).depends_on_rows()


@pytest.mark.parametrize("function", [torch.ops.aten.exp.default, torch.ops.aten.tanh.default])
def test_what_says_no_difference_depends_on_nothing(function, threads):
    threads(3)
    for width in (16, 1000):
        shape, strides = (1, PROBE_TOKENS, width), (PROBE_TOKENS * width, width, 1)
        call = Call(function, (), {}, torch.float32, shape, strides, 1)
        assert not call.depends_on_rows()


def test_the_functions_of_a_forward_are_found_whatever_calls_them():
    """Of inputs, and of heads in place. One of no row is not, nor a product."""
    with Watch(PROBE_TOKENS) as watch:
        rows = torch.ones(1, PROBE_TOKENS, 16) * 2
        functional.gelu(rows, approximate="tanh")
        functional.silu(torch.ones(16))
        rows.reshape(1, -1, 4, 4).transpose(1, 2).contiguous().sigmoid_()
    names = [str(call.function) for call in watch.calls]
    assert ["aten.gelu.default", "aten.sigmoid_.default"] == names
    assert [(16, 1), (16, 2)] == [(call.width, call.rows) for call in watch.calls]
