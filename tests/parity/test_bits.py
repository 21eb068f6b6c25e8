"""A token's attention has the same bits alone, in a chunk of any size and after a prefix."""

import pytest
import torch

from engine.attention import agreement, cpu, dense, latent
from engine.attention.dense import onednn_product
from tests.children import ran
from tests.parity.bits import FEW, computed, differing


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(shape):
    assert list(differing(shape, lengths=(40, 330))) == []


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_compiled_operators_give_the_bits_of_torchs_calls(shape, operators):
    assert list(differing(shape, lengths=(40, 330), fused=True)) == []


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_the_same_holds_where_onednn_multiplies(shape, monkeypatch):
    by_blas = computed(shape, 330, [330], torch.float32)
    monkeypatch.setattr(cpu, "needs_onednn", lambda *_: True)
    assert list(differing(shape, lengths=(40, 330))) == []
    if shape.dim <= dense.PIECE:  # more are one chain of multiply-adds for one library alone
        assert torch.equal(by_blas, computed(shape, 330, [330], torch.float32))


@pytest.mark.parametrize(("left", "needed"), [(8, True), (7, False)])
def test_onednn_multiplies_where_few_rows_have_other_bits(left, needed, monkeypatch):
    """As MKL has for rows that its kernels leave over on Intel processors without AVX-512."""
    product = torch.mm

    def in_another_order(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        if len(rows) % 12 == left:
            return product(rows.double(), columns.double()).float()
        return onednn_product(rows, columns)

    monkeypatch.setattr(agreement.torch, "mm", in_another_order)
    assert agreement.needs_onednn.__wrapped__(64, 64) == needed


@pytest.mark.parametrize("unsteady", [False, True])
@pytest.mark.parametrize("width", [(16, 32), (64, 256), (512, 128)])
def test_a_row_times_the_matrix_of_its_head_has_the_same_bits_among_any_number(
    width, unsteady, monkeypatch
):
    """Where a product of few rows is summed backwards, oneDNN multiplies."""
    product = torch.bmm

    def summed_backwards(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        few = rows.shape[1] < 20
        return product(rows.flip(-1), matrices.flip(-2)) if few else product(rows, matrices)

    if unsteady:
        monkeypatch.setattr(torch, "bmm", summed_backwards)
        monkeypatch.setattr(latent, "script", lambda function: function)
    monkeypatch.setattr(latent, "heads_need_onednn", agreement.heads_need_onednn.__wrapped__)
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(130, 3, width[0], generator=random)
    matrices = torch.randn(3, *width[::-1], generator=random).transpose(1, 2)
    multiply = latent.ByHead(matrices)
    whole = multiply(rows)
    counts = (2, 3, 4, 5, 7, 8, 12, 17, 20, 33, 60, 64, 65)
    assert [n for n in counts if not torch.equal(multiply(rows[:n]), whole[:n])] == []
    expected = torch.einsum("thk,hkn->thn", rows.double(), matrices.double())
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=1e-4)


WITHOUT_ONEDNN = """
import torch

class Nothing:
    def __getattr__(self, name):
        raise AttributeError(name)

torch.ops.mkldnn = Nothing()
from tests.parity.bits import FEW, computed
whole = computed(FEW[0], 200, [200], torch.float32)
assert whole.isfinite().all()
"""


def test_a_build_of_torch_without_onednn_attends():
    """As for Apple's processors."""
    ran(WITHOUT_ONEDNN)


def test_the_same_holds_in_bfloat16():
    assert list(differing(FEW[0], lengths=(330,), dtype=torch.bfloat16)) == []


def test_the_check_finds_rows_that_are_not_padded(monkeypatch):
    """A reduction whose order depends on the number of rows, as many libraries have."""
    product, by_onednn = torch.bmm, onednn_product

    def summed_backwards(one: torch.Tensor, other: torch.Tensor, **given: torch.Tensor) -> object:
        return product(one.flip(-1), other.flip(-2), **given)

    def few_backwards(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        few = len(rows) <= dense._ROWS
        return by_onednn(rows.flip(-1), columns.flip(0)) if few else by_onednn(rows, columns)

    monkeypatch.setattr("engine.attention.cpu.script", lambda function: function)
    shape = FEW[0]
    before = computed(shape, 200, [200], torch.float32)
    assert torch.equal(before, computed(shape, 200, [199, 1], torch.float32))
    monkeypatch.setattr(dense.torch, "bmm", summed_backwards)
    monkeypatch.setattr(dense, "onednn_product", few_backwards)  # by whichever multiplies here
    after = computed(shape, 200, [199, 1], torch.float32)
    assert torch.equal(before[:199], after[:199])
    assert not torch.equal(before[199], after[199])
