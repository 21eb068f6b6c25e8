"""Models from GGUF files against transformers' own: of each architecture, the same logits, and for
each kind of rope, also on prompts past the context that the weights were trained for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.execution.runner import ModelRunner
from engine.models.gguf_config import ARCHITECTURES
from engine.models.load import load_model
from tests.support.gguf_files import KINDS, fields_of, stock, tensors_of, write_gguf
from tests.support.models import VOCAB_SIZE, generated, greedy_tokens, new_pool, save_model

TRAINED = 128  # the context before it was stretched
PROMPT = 300
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
UNEVEN = [1.0, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 8.0]
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
BEFORE = {"rope.scaling.original_context_length": TRAINED}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, **BEFORE}
BETAS = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
TRAINED_FOR = {"original_max_position_embeddings": TRAINED}
BY_FOUR = {"factor": 4.0, **TRAINED_FOR}
SLOW = {"beta_fast": 16, "beta_slow": 2}
TWICE = 2 * (0.1 * np.log(4.0) + 1)


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LONG = {"long_factor": UNEVEN, "short_factor": [1.0] * 8, "attention_factor": 1.25, **TRAINED_FOR}
EVERY = {"long_factor": UNEVEN, "short_factor": UNEVEN, "factor": 1.0, "attention_factor": 1.0}
GEMMA = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
# By name: GGUF's architecture, its fields, and what transformers' config says.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", LINEAR, rope("linear", factor=4.0)),
    "linear by default": ("llama", {"rope.scaling.factor": 4.0}, rope("linear", factor=4.0)),
    "scale_linear": ("qwen2", {"rope.scale_linear": 2.0}, rope("linear", factor=2.0)),
    "none": ("llama", {**LINEAR, "rope.scaling.type": "none"}, {}),
    "yarn": ("qwen3", YARN, rope("yarn", **BY_FOUR)),
    "yarn with its own betas": ("llama", {**YARN, **BETAS}, rope("yarn", **SLOW, **BY_FOUR)),
    "yarn with its own attention": (
        "llama",
        {**YARN, "rope.scaling.attn_factor": 2.0},
        rope("yarn", attention_factor=TWICE, **BY_FOUR),
    ),
    "theta": ("qwen2", {"rope.freq_base": 5e5}, rope("default", rope_theta=5e5)),
    "longrope": (
        "phi3",
        {**BEFORE, "rope.scaling.attn_factor": 1.25},
        {**rope("longrope", **LONG), **TRAINED_FOR},
    ),
    "any factors": ("llama", {}, rope("longrope", **EVERY, **TRAINED_FOR)),
    "gemma3": (
        "gemma3",
        {**LINEAR, "rope.freq_base": 1e6, "rope.scaling.factor": 8.0},
        {"rope_parameters": GEMMA},
    ),
}
TABLES = {
    "longrope": {"rope_factors_long.weight": UNEVEN, "rope_factors_short.weight": [1.0] * 8},
    "any factors": {"rope_freqs.weight": UNEVEN},
}


def served(path: Path, cache: Path) -> Any:
    return load_model(str(path), device="cpu", dtype="float32", cache_dir=cache)


def greedy(loaded: Any, prompt: torch.Tensor) -> list[int]:
    runner = ModelRunner(loaded, new_pool(loaded, 32))
    [tokens] = generated(runner, [prompt.tolist()], 8, tables=[list(range(32))])
    return tokens


def expected(model: Any, prompt: torch.Tensor) -> list[int]:
    return greedy_tokens(model, prompt.tolist(), 8)


def prompt_of(length: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(0, VOCAB_SIZE - 2, length))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_architecture_has_transformers_tokens(kind, tmp_path):
    model = stock(kind)
    write_gguf(tmp_path / "m.gguf", kind, fields_of(kind, model), tensors_of(kind, model))
    loaded = served(tmp_path / "m.gguf", tmp_path)
    assert type(model) is type(loaded.model)
    assert KINDS.keys() == ARCHITECTURES.keys()
    prompt = prompt_of(100)
    assert expected(model, prompt) == greedy(loaded, prompt)


@pytest.mark.parametrize("name", CASES)
def test_each_rope_has_transformers_tokens_past_its_trained_context(name, tmp_path):
    """As a GGUF file and as a folder of safetensors. A rope that is dropped has other tokens."""
    kind, fields, config = CASES[name]
    model, plain = stock(kind, **config), stock(kind)
    own = {f"{kind}.{field}": value for field, value in fields.items()}
    tensors = {each: np.array(value, np.float32) for each, value in TABLES.get(name, {}).items()}
    write_gguf(
        tmp_path / "m.gguf", kind, fields_of(kind, model) | own, tensors_of(kind, model) | tensors
    )
    save_model(tmp_path / "folder", model)
    prompt = prompt_of(PROMPT)
    tokens = expected(model, prompt)
    assert tokens == greedy(served(tmp_path / "m.gguf", tmp_path), prompt)
    assert tokens == greedy(served(tmp_path / "folder", tmp_path), prompt)
    assert (tokens == expected(plain, prompt)) == (name == "none")


def test_llama31_is_told_by_its_factors(tmp_path):
    """They are in a tensor, with no field that names them."""
    context = {"max_position_embeddings": 32768}
    scaling = rope("llama3", **LLAMA3, original_max_position_embeddings=8192)
    model = stock("llama", **context, **scaling)
    rotary = model.model.rotary_emb.inv_freq
    factors = (stock("llama", **context).model.rotary_emb.inv_freq / rotary).numpy()
    tensors = tensors_of("llama", model) | {"rope_freqs.weight": factors}
    write_gguf(tmp_path / "m.gguf", "llama", fields_of("llama", model), tensors)
    loaded = served(tmp_path / "m.gguf", tmp_path)
    assert loaded.model.config.rope_parameters["rope_type"] == "llama3"
    assert torch.equal(loaded.model.model.rotary_emb.inv_freq, rotary)


@pytest.mark.parametrize(
    ("model_type", "config", "fields"),
    [
        ("mistral", {"sliding_window": 32}, {"attention.sliding_window": 32}),
        ("qwen2", {}, {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    ],
)
def test_what_gguf_calls_llama_is_what_its_fields_and_tensors_say(
    model_type, config, fields, tmp_path
):
    model = stock("llama", model_type, **config)
    own = {f"llama.{field}": value for field, value in fields.items()}
    given = fields_of("llama", model) | own
    write_gguf(tmp_path / "m.gguf", "llama", given, tensors_of("llama", model))
    loaded = served(tmp_path / "m.gguf", tmp_path)
    assert model_type == loaded.model.config.model_type
    prompt = prompt_of(100)
    assert expected(model, prompt) == greedy(loaded, prompt)
