"""RMS norms as one call: where it is the same, and where a module computes something else."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.models.norms import FusedNorm, fuse_norms
from tests.support.models import stock_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_norm_differs_by_rounding_alone(dtype):
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    nn.init.uniform_(norm.weight, -2, 2)
    rows = (100 * torch.randn(3, 5, 64)).to(dtype)
    own, fused = norm(rows), FusedNorm(norm)(rows)
    assert own.dtype == fused.dtype
    torch.testing.assert_close(own, fused, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


class Shifted(nn.Module):
    """A norm that subtracts the mean."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, rows):
        return nn.functional.layer_norm(rows, (16,), self.weight, eps=self.eps)


def test_a_module_that_computes_something_else_is_left():
    """Gemma's weight counts from one."""
    with pytest.raises(ValueError, match="GemmaRMSNorm is not a plain RMS norm"):
        FusedNorm(GemmaRMSNorm(16).requires_grad_(False))
    with pytest.raises(ValueError, match="not a plain"):
        FusedNorm(Shifted())


class GatedRMSNorm(LlamaRMSNorm):
    """Like several of transformers', plain without its gate."""

    def forward(self, hidden_states, gate=None):
        normed = super().forward(hidden_states)
        return normed if gate is None else normed * gate


def test_a_norm_with_a_gate_is_left():
    model = nn.Sequential(GatedRMSNorm(16), LlamaRMSNorm(16)).requires_grad_(False)
    assert 1 == fuse_norms(model)
    assert isinstance(model[0], GatedRMSNorm) and isinstance(model[1], FusedNorm)


@pytest.mark.parametrize(("name", "count"), [("qwen3", 13), ("gemma2", 0)])
@torch.inference_mode()
def test_a_model_with_fused_norms_gives_the_same_logits(name, count):
    """Qwen3 has four in each of three layers, and one behind them."""
    model = stock_model(name, 0)
    tokens = torch.arange(20)[None] * 7 % 250
    before = model(tokens).logits
    assert count == fuse_norms(model)
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-4)
