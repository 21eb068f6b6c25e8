"""A token's attention has the same bits alone, in a chunk of any size and after a prefix."""

import pytest
import torch

from engine.attention import agreement, cpu, dense
from engine.attention.dense import onednn_product
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


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_the_same_holds_where_onednn_multiplies(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_blas = computed(shape, 330, [330], torch.float32)
    monkeypatch.setattr(cpu, "needs_onednn", lambda *_: True)
    assert list(differing(shape, lengths=(40, 330))) == []
    if shape.dim <= dense.PIECE:  # more are one chain of multiply-adds for one library alone
        assert torch.equal(by_blas, computed(shape, 330, [330], torch.float32))


@pytest.mark.parametrize(("left", "needed"), [(8, True), (7, False)])
def test_onednn_multiplies_where_few_rows_have_other_bits(
    left: int, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MKL has for rows that its kernels leave over on Intel processors without AVX-512."""
    product = torch.mm

    def in_another_order(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        if len(rows) % 12 == left:
            return product(rows.double(), columns.double()).float()
        return onednn_product(rows, columns)

    monkeypatch.setattr(agreement.torch, "mm", in_another_order)
    assert agreement.needs_onednn.__wrapped__(64, 64) == needed


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
