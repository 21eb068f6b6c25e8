"""A model that is built without filling and without symbols is the one that is built with them."""

import contextlib
import logging

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from engine.models import load
from engine.models.unfilled import Unfilled
from tests.parity.architectures import stock

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
