"""Finding and refusing models. Nothing is downloaded."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig

from engine.batch import Batch, Span
from engine.errors import ModelError
from engine.execution.runner import Runner
from engine.models.load import load_model, prepare
from engine.request import SamplingParams
from engine.testing.models import bytes_tokenizer, new_pool, save_tiny_model


def load(name: object, tmp_path: Path, **arguments: str) -> object:
    given = {"device": "cpu", "dtype": "auto", **arguments}
    return load_model(str(name), cache_dir=tmp_path / "cache", **given)


def test_a_folder_is_loaded_and_described(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen3")
    loaded = load_model(
        str(tmp_path / "model"), device="cpu", dtype="auto", cache_dir=tmp_path / "cache"
    )
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim) == (3, 2, 16)
    assert (loaded.dtype, loaded.max_context, loaded.eos_token_ids) == ("float32", 1024, {256})
    assert loaded.tokenizer.digest == bytes_tokenizer().digest
    assert loaded.layout(64, "bfloat16").shape == (3, 2, 64, 2, 16)
    tokens = np.arange(20, dtype=np.int32)
    span = Span(1, tokens, 0, [0, 1], True, SamplingParams(temperature=0))
    (sampled,) = Runner(loaded, new_pool(loaded, 2)).step(Batch([span]))
    assert sampled.token is not None


def test_the_digest_is_the_contents(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        save_tiny_model(tmp_path / name, seed=seed)
    a, b, c = (
        load_model(str(tmp_path / name), device="cpu", dtype="float32", cache_dir=tmp_path)
        for name in "abc"
    )
    assert a.weights_digest == b.weights_digest != c.weights_digest
    half = load_model(str(tmp_path / "a"), device="cpu", dtype="bfloat16", cache_dir=tmp_path)
    assert half.weights_digest != a.weights_digest


def test_what_cannot_be_found_says_what_could_be(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model 'nonsense'.*smollm2-135m"):
        load("nonsense", tmp_path)
    with pytest.raises(ModelError, match="0 GGUF files"):
        load(tmp_path, tmp_path)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        load(tmp_path / "x.txt", tmp_path)
    (tmp_path / "x.gguf").write_text("not a model")
    with pytest.raises(ModelError, match="not a readable GGUF"):
        load(tmp_path / "x.gguf", tmp_path)
    with pytest.raises(ModelError, match="dtype 'int8'"):
        load("smollm2-135m", tmp_path, dtype="int8")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load(tmp_path / "model", tmp_path)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would fill them with random numbers and go on."""
    folder = tmp_path / "model"
    save_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the weights.*layers\.1\.mlp\.up_proj"):
        load(folder, tmp_path)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ModelError, match="encoder-decoder"):
        load(tmp_path / "model", tmp_path)


def test_a_model_without_the_attention_interface_is_refused() -> None:
    config = MambaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4, use_mambapy=False
    )
    with pytest.raises(ModelError, match="attention interface"):
        prepare(AutoModelForCausalLM.from_config(config).eval())


def test_a_model_whose_attention_is_not_what_we_compute_is_refused() -> None:
    """The check that guards every model nobody thought of: other logits, no service."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    eager = model.model.layers[1].self_attn.forward

    def biased(*arguments: object, **named: object) -> object:
        output, weights = eager(*arguments, **named)
        if model.config._attn_implementation == "eager":
            output = output + 0.5
        return output, weights

    model.model.layers[1].self_attn.forward = biased
    with torch.inference_mode(), pytest.raises(ModelError, match="other logits"):
        prepare(model)
