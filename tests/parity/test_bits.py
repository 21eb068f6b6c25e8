"""A token's attention has the same bits alone, in a chunk of any size and after a prefix."""

import pytest
import torch

from engine.attention import dense
from engine.operators.library import Operators
from tests.parity.bits import FEW, Shape, computed, differing


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(shape: Shape) -> None:
    assert list(differing(shape, lengths=(40, 330))) == []


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_compiled_operators_give_the_bits_of_torchs_calls(
    shape: Shape, operators: Operators
) -> None:
    assert list(differing(shape, lengths=(40, 330), fused=True)) == []


def test_the_same_holds_in_bfloat16() -> None:
    assert list(differing(FEW[0], lengths=(330,), dtype=torch.bfloat16)) == []


def test_the_check_finds_rows_that_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction whose order depends on the number of rows, as many libraries have."""
    product = torch.bmm

    def summed_backwards(one: torch.Tensor, other: torch.Tensor, **given: torch.Tensor) -> object:
        return product(one.flip(-1), other.flip(-2), **given)

    monkeypatch.setattr("engine.attention.cpu.script", lambda function: function)
    shape = FEW[0]
    before = computed(shape, 200, [200], torch.float32)
    assert torch.equal(before, computed(shape, 200, [199, 1], torch.float32))
    monkeypatch.setattr(dense.torch, "bmm", summed_backwards)
    after = computed(shape, 200, [199, 1], torch.float32)
    assert torch.equal(before[:199], after[:199])
    assert not torch.equal(before[199], after[199])
