"""Weights made of few bits are stored in these, and give the bits of oneDNN's products."""

import pytest
import torch
from torch import nn

from engine.models.packing import (
    CannotNarrow,
    NarrowLinear,
    PackedLinear,
    Packing,
    PaddedLinear,
)
from engine.operators.library import Operators

pytestmark = pytest.mark.usefixtures("operators")

WIDTHS = ((32, 32), (576, 64), (1056, 96), (2080, 32))  # one chain of products, and several
KINDS = {"fours": 768, "symmetric": 768, "eights": 1152, "halves": 2048}  # bytes for 32 x 32


def half(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.half().float()


def weight(kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """[outputs, inputs], as a checkpoint has them: of GGUF's Q4_1 and Q8_0, or bfloat16.

    And of 4 bits of either sign with positive steps, which Q4_0 does not have.
    """
    random = torch.Generator().manual_seed(outputs * inputs)
    groups = outputs, inputs // 32, 1
    step = half(torch.rand(groups, generator=random) * 0.01 + 1e-5)
    least = half(-torch.rand(groups, generator=random) * 0.1)

    def drawn(low: int, high: int) -> torch.Tensor:
        made = torch.randint(low, high + 1, (*groups[:2], 32), generator=random).float()
        made[..., 5], made[..., 7] = low, high  # the quantizer's least and most
        return made

    match kind:
        case "fours":
            made = step * drawn(0, 15) + least
            made[0, 0] = least[0, 0]  # all of a group are equal
        case "symmetric":
            made = step * drawn(-8, 7)
        case "eights":
            made = step * drawn(-127, 127)
            made[0, 0] = 0
        case _:
            made = torch.randn((*groups[:2], 32), generator=random).bfloat16().float()
    return made.view(outputs, inputs)


def layer(given: torch.Tensor, *, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(given.shape[1], given.shape[0], bias=bias)
    linear.weight = nn.Parameter(given)
    return linear.requires_grad_(False)


def rows_of(count: int, width: int) -> torch.Tensor:
    return torch.randn(1, count, width, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_bits_of_packed_weights(kind: str, bias: bool) -> None:
    before = torch.get_num_threads()
    try:
        for inputs, outputs in WIDTHS:
            linear = layer(weight(kind, outputs, inputs), bias=bias)
            narrow, packed = Packing(narrow=True)(linear, alone=False), PackedLinear(linear)
            if not isinstance(narrow, NarrowLinear):
                pytest.skip("this oneDNN adds in an order of its own")
            assert narrow._packed.numel() == KINDS[kind] * outputs * inputs // 1024
            for count in (2, 3, 4, 5, 7, 13, 37, 97, 193, 200):
                rows = rows_of(count, inputs)
                expected = packed(rows)
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    assert torch.equal(narrow(rows), expected)
                assert torch.equal(narrow(rows[:, -1:]), expected[:, -1:]), "one row alone"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_can_be_had_again(kind: str) -> None:
    given = weight(kind, 64, 96)
    narrow = NarrowLinear(layer(given))
    assert torch.equal(narrow.weight, given) and narrow.weight is narrow.weight


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_of_a_weight_is_lost(kind: str) -> None:
    """One number is the next float32, or the other zero: such a weight is not stored so."""
    given = weight(kind, 64, 96)
    given[40, 70] = torch.nextafter(given[40, 70], torch.tensor(9.0))
    with pytest.raises(CannotNarrow):
        NarrowLinear(layer(given))
    assert type(Packing(narrow=True)(layer(given), alone=False)) is PackedLinear
    for row in (0, 40):  # in a group of zeros, and among others
        given = weight("eights", 64, 96)
        given[row, 0] = -0.0
        with pytest.raises(CannotNarrow):
            NarrowLinear(layer(given))


def test_other_widths_and_weights_of_all_bits_are_packed_as_ever() -> None:
    packed = Packing(narrow=True)
    for outputs, inputs in ((48, 64), (64, 48)):
        given = torch.ones(outputs, inputs)
        assert type(packed(layer(given), alone=False)) is PackedLinear
    assert type(packed(layer(torch.randn(64, 64)), alone=False)) is PackedLinear
    assert type(packed(layer(torch.randn(64, 64)), alone=True)) is PaddedLinear
    assert type(packed(layer(torch.ones(64, 64)), alone=True)) is NarrowLinear
    assert type(Packing(narrow=False)(layer(torch.ones(64, 64)), alone=False)) is PackedLinear


def test_a_shape_whose_bits_differ_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another oneDNN may add in another order."""
    own = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: own(self, rows) + 1e-6)
    assert type(Packing(narrow=True)(layer(torch.ones(64, 64)), alone=False)) is PackedLinear


@pytest.mark.parametrize("chain", [256, 512, 2048, 2176])
def test_chains_of_another_length_are_found(chain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another oneDNN, or processor, may end a chain of products elsewhere."""
    linear = layer(weight("halves", 32, 2176))
    other = NarrowLinear(linear)
    other.chain = chain
    forward = NarrowLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: forward(other, rows))
    found = Packing(narrow=True)(linear, alone=False)
    assert isinstance(found, NarrowLinear) and found.chain == chain
    exact = rows_of(9, 2176).double() @ linear.weight.double().T
    assert torch.allclose(found(rows_of(9, 2176)).double(), exact, atol=1e-3)


def test_rows_that_do_not_lie_together_are_multiplied(operators: Operators) -> None:
    linear = layer(weight("halves", 32, 64))
    rows = rows_of(64, 8).transpose(1, 2)
    assert not rows.is_contiguous()
    assert torch.equal(NarrowLinear(linear)(rows), NarrowLinear(linear)(rows.contiguous()))
    assert NarrowLinear(linear)(torch.empty(1, 0, 64)).shape == (1, 0, 32)
