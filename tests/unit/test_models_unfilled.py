"""What a start makes of a model: built without filling and without symbols it is the one that is
built with them, its RMS norms are one call each, and packed it keeps little beside its weights."""

import contextlib
import gc
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.models import load
from engine.models.load import load_model
from engine.models.norms import FusedNorm, fuse_norms
from engine.models.unfilled import Unfilled
from tests.children import ran
from tests.parity.architectures import stock
from tests.support.models import save_tiny_model, stock_model

# Of the last ones, modules join numbers in sequence with meta tensors: they are built again.
QUICK, SLOW = ("llama", "mamba2", "gpt_neox"), ("phi3", "gemma4_text")


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and other tensors that modules hold."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        held = {name: each for name, each in vars(module).items() if isinstance(each, torch.Tensor)}
        found |= {f"{path}.{name}": each for name, each in held.items()}
    return found


@pytest.mark.parametrize("model_type", [*QUICK, *SLOW])
def test_it_has_the_same_tensors(model_type, tmp_path, monkeypatch, caplog):
    stock(model_type).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    caplog.set_level(logging.INFO, load.__name__)
    quick = tensors_of(load._load_weights(tmp_path, config, torch.float32, "cpu"))
    assert ("with symbols" in caplog.text) == (model_type in SLOW)
    monkeypatch.setattr(load, "Unfilled", contextlib.nullcontext)
    plain = tensors_of(load._load_weights(tmp_path, config, torch.float32, "cpu"))
    assert quick.keys() == plain.keys() and len(plain) > 10
    for name, tensor in plain.items():
        assert tensor.device.type == "cpu"
        assert torch.equal(quick[name], tensor), name


def test_tensors_with_numbers_are_filled_as_ever():
    with Unfilled():
        layer = nn.Linear(4, 4)
        nn.init.uniform_(layer.weight, 5, 6)
        layer.bias.data.normal_(100, 1)
        assert torch.arange(3, device="cpu").tolist() == [0, 1, 2]
        with torch.device("meta"):
            assert nn.Linear(4, 4).weight.is_meta
    assert layer.weight.min() >= 5 and layer.bias.min() > 50


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


PROGRAM = """
import os
from pathlib import Path

import torch

from engine.models.packing import PackedLinear


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


torch.set_num_threads(1)
layers = [PackedLinear(torch.nn.Linear(width, 64)) for width in (64, 96)]
before = resident_bytes()
with torch.inference_mode():
    for rows in range(2, 500):
        for layer in layers:
            layer(torch.zeros(rows, layer.in_features))
print((resident_bytes() - before) >> 20)
"""


def test_kernels_of_many_row_counts_do_not_fill_the_memory():
    """oneDNN and ideep keep 1,024 each by default: 460 MB here, and for good."""
    assert int(ran(PROGRAM)) < 150


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_a_packed_model_does_not_keep_its_file_in_memory(tmp_path):
    save_tiny_model(tmp_path / "model")
    weights = str(tmp_path / "model" / "model.safetensors")
    loaded = load_model(
        str(tmp_path / "model"), device="cpu", dtype="float32", cache_dir=tmp_path / "cache"
    )
    gc.collect()
    assert weights not in Path("/proc/self/maps").read_text()
    assert loaded.model.get_input_embeddings().weight.isfinite().all()
