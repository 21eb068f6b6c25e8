"""Adapters against peft's own model: the same tokens alone, mixed in one batch, and merged."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.base import ReferenceAttention
from engine.batch import Span
from engine.execution.runner import ModelRunner
from engine.models.load import load_adapter
from engine.request import SamplingParams
from tests.support.models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    generated,
    greedy_tokens,
    new_pool,
    save_tiny_adapter,
    stock_model,
    tiny_model,
)

GREEDY = SamplingParams(temperature=0)
NEW_TOKENS = 8
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 8},
    "all linear": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear"},
    "rank stabilised": {"r": 4, "lora_alpha": 3, "use_rslora": True},
    "by regex": {"r": 2, "lora_alpha": 2, "target_modules": r".*layers\.[01]\.mlp\.(up|down)_proj"},
    "by pattern": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ALL_LINEAR,
        "rank_pattern": {"q_proj": 1, r"layers\.1\.mlp\.up_proj": 6},
        "alpha_pattern": {"v_proj": 16, "up_proj": 5},
    },
    "one layer": {"r": 3, "target_modules": ["q_proj"], "layers_to_transform": [1]},
}


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length, dtype=np.int32)


def peft_tokens(architecture, folder, tokens, *, merged=False):
    """Greedy tokens of peft's model over transformers' own, recomputed whole for every token."""
    from peft import PeftModel

    base = stock_model(architecture)
    base.set_attn_implementation("eager")
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    if merged:
        model = model.merge_and_unload()
    return greedy_tokens(model, tokens.tolist(), NEW_TOKENS)


def run(runner, prompts, chunk=1000):
    """Greedy tokens of several prompts served together, each with its adapter."""
    adapters, tokens = zip(*prompts, strict=True)
    return generated(runner, tokens, NEW_TOKENS, chunk=chunk, adapters=adapters)


def runner_of(loaded, attention=None):
    pool = new_pool(loaded, 80)
    return ModelRunner(loaded, pool, attention(pool) if attention else None)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_answers_as_it_does_in_peft(name, tmp_path):
    save_tiny_adapter(tmp_path, **CONFIGS[name])
    loaded = tiny_model()
    load_adapter(loaded, "own", str(tmp_path))
    [base] = run(runner_of(loaded), [(None, prompt(30))])
    [adapted] = run(runner_of(loaded), [("own", prompt(30))])
    assert peft_tokens("llama", tmp_path, prompt(30)) == adapted
    assert peft_tokens("llama", tmp_path, prompt(30), merged=True) == adapted
    assert base != adapted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_takes_adapters(architecture, tmp_path):
    save_tiny_adapter(tmp_path, architecture, r=4, target_modules="all-linear")
    loaded = tiny_model(architecture)
    load_adapter(loaded, "own", str(tmp_path))
    [adapted] = run(runner_of(loaded), [("own", prompt(70))], chunk=16)
    assert peft_tokens(architecture, tmp_path, prompt(70)) == adapted
    [reference] = run(runner_of(loaded, ReferenceAttention), [("own", prompt(70))])
    assert reference == adapted


def test_a_mixed_batch_answers_as_each_does_alone(tmp_path):
    """Rows of three adapters and of none, in one step, as listed rows and as runs."""
    loaded = tiny_model()
    for number, rank in enumerate((1, 4, 16)):
        save_tiny_adapter(tmp_path / str(number), seed=number, r=rank, target_modules=ALL_LINEAR)
        load_adapter(loaded, f"a{number}", str(tmp_path / str(number)))
    names = ("a0", None, "a1", "a0", "a2", None, "a1")
    given = [(name, prompt(9 + 5 * number, number % 3)) for number, name in enumerate(names)]
    alone = [run(runner_of(loaded), [one])[0] for one in given]
    assert alone == run(runner_of(loaded), given)
    assert alone == run(runner_of(loaded), given, chunk=16)
    assert len({tuple(tokens) for tokens in alone}) > 3


def test_the_base_model_keeps_its_bits_beside_adapters(tmp_path):
    """Its logits are those of a model that never heard of adapters, alone and in a mixed step."""
    save_tiny_adapter(tmp_path, r=4, target_modules=ALL_LINEAR)
    loaded = tiny_model()
    load_adapter(loaded, "own", str(tmp_path))
    table = list(range(4))
    plain = Span(1, prompt(20), 0, table, True, GREEDY)
    other = Span(2, prompt(21), 0, [8, 9], True, GREEDY, adapter="own")
    expected, _ = runner_of(tiny_model())._forward([plain])
    beside, _ = runner_of(loaded)._forward([plain, other])
    assert torch.equal(expected[0], beside[0])
    assert not torch.allclose(expected[0], beside[1])
    alone, _ = runner_of(loaded)._forward([other])
    assert alone is not None and torch.equal(alone[0], beside[1])


def test_a_replaced_or_removed_adapter_is_no_longer_served(tmp_path):
    loaded = tiny_model()
    for number in range(2):
        save_tiny_adapter(tmp_path / str(number), seed=number, r=4)
    first = load_adapter(loaded, "own", str(tmp_path / "0"))
    twin = load_adapter(loaded, "twin", str(tmp_path / "0"))
    assert first.digest == twin.digest
    [before] = run(runner_of(loaded), [("own", prompt(30))])
    second = load_adapter(loaded, "own", str(tmp_path / "1"))
    assert first.digest != second.digest
    after, twins = run(runner_of(loaded), [("own", prompt(30)), ("twin", prompt(30))])
    assert before != after and before == twins
    loaded.adapters.remove("own")
    loaded.adapters.remove("twin")
    assert {} == dict(loaded.adapters.digests)
    wrapped = loaded.model.get_submodule("model.layers.0.self_attn.q_proj")
    assert {} == wrapped.updates
