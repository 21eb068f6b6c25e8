"""What the probe at load refuses, and with what it says it saw. Each model is broken on purpose."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.attention import base as attention
from engine.errors import ModelError
from engine.models import probe
from engine.models.probe import prepare
from engine.models.rope import fix_tables
from tests.support.models import ARCHITECTURES, stock_model
from tiers.blocks.layout import LayerLayout, torch_dtype


@pytest.fixture(autouse=True)
def registered():
    attention.register()


def wrapped(module, around):
    """`module.forward` becomes `around(forward, *arguments)`."""
    forward = module.forward
    module.forward = lambda *arguments, **named: around(forward, *arguments, **named)


WINDOWS = {"mistral": [40] * 3, "gemma2": [24, None, 24]}


def test_every_tiny_model_passes_and_gets_its_windows_back():
    for architecture in ARCHITECTURES:
        model = stock_model(architecture)
        fix_tables(model, 1024)
        windows = [getattr(module, "sliding_window", None) for module in model.modules()]
        kept = prepare(model)
        assert (LayerLayout(2, 16, 16),) * 3 == tuple(replace(each, window=None) for each in kept)
        assert WINDOWS.get(architecture, [None] * 3) == [each.window for each in kept]
        assert windows == [getattr(module, "sliding_window", None) for module in model.modules()]
        assert {24, 40, None} >= {getattr(model.config, "sliding_window", None)}


def test_a_table_chosen_by_the_longest_sequence_beside_is_refused():
    model = stock_model("llama")

    def stretched(forward, states, position_ids):
        scale = 2 if position_ids.max() >= 500 else 1
        return forward(states, position_ids * scale)

    wrapped(model.model.rotary_emb, stretched)
    with pytest.raises(
        ModelError, match="other keys or values beside other sequences than alone, at positions 0 "
    ):
        prepare(model)


def test_a_table_that_changes_at_a_border_of_the_config_is_refused():
    """Nothing is beside it: the same prefix, continued across the boundary."""
    model = stock_model("llama")
    model.config.original_max_position_embeddings = 300

    def switched(forward, states, position_ids):
        crosses = position_ids.max() >= 300 and position_ids.max() < 1000
        return forward(states, position_ids * (2 if crosses else 1))

    wrapped(model.model.rotary_emb, switched)
    with pytest.raises(ModelError, match="in chunks than alone, at positions 296 to 303 in layer"):
        prepare(model)


def test_a_window_that_never_reaches_paged_attention_is_refused():
    """8 tokens lie inside any real window; the probe narrows it."""
    model = stock_model("gemma2")

    def unaware(forward, *arguments, **named):
        if model.config._attn_implementation != "eager":
            layer.sliding_window = None
        return forward(*arguments, **named)

    layer = model.model.layers[0].self_attn
    wrapped(layer, unaware)
    with pytest.raises(ModelError, match="where windows are narrowed to 3 tokens"):
        prepare(model)


def test_a_layer_that_looks_at_its_neighbours_is_refused():
    """Like an expert with room for a limited number of tokens."""
    model = stock_model("llama")
    wrapped(
        model.model.layers[2].mlp,
        lambda forward, states: forward(states) * (1 if states.shape[1] <= 8 else 2),
    )
    with pytest.raises(ModelError, match="other logits beside another sequence than alone"):
        prepare(model)


def test_a_model_that_fails_in_its_own_code_is_refused_with_what_it_said():
    model = stock_model("llama")

    def failing(forward, states):
        raise IndexError("no such expert")

    wrapped(model.model.layers[1].mlp, failing)
    with pytest.raises(ModelError, match=r"cannot be run .*\(IndexError: no such expert\)"):
        prepare(model)


def test_tables_of_longrope_are_refused_unless_fixed():
    with pytest.raises(ModelError, match="beside other sequences than alone"):
        prepare(stock_model("phi3"))
    model = stock_model("phi3")
    assert fix_tables(model, 1024)
    assert (LayerLayout(2, 16, 16),) * 3 == prepare(model)
    assert not fix_tables(stock_model("llama"), 1024)


def test_dynamic_rope_is_one_table_as_far_as_the_context_goes():
    """transformers stretches it beyond the context only, and never narrows it again."""
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(**{**stock_model("llama").config.to_dict(), "rope_parameters": parameters})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain = model.model.rotary_emb(torch.zeros(1), torch.arange(1024)[None])
    assert fix_tables(model, 1024)
    fixed = model.model.rotary_emb(torch.zeros(1), torch.arange(1024)[None])
    assert all(map(torch.equal, plain, fixed))
    assert (LayerLayout(2, 16, 16),) * 3 == prepare(model, 1024)


@pytest.mark.parametrize(
    ("dtype", "rounding", "moved", "refused"),
    [
        ("bfloat16", 0.0, 0.04, False),
        ("bfloat16", 0.0, 0.06, True),
        ("bfloat16", 0.08, 0.06, False),  # 32 layers of 4,096
        ("bfloat16", 0.03, 0.07, True),
        ("bfloat16", 0.08, 0.11, True),
        ("bfloat16", 0.5, 0.13, True),  # half the scale of scores, in 32 layers
        ("float32", 0.08, 0.01, True),
    ],
)
def test_a_deep_model_in_half_precision_may_round_more(dtype, rounding, moved, refused):
    model = stock_model("llama", 0).to(torch_dtype(dtype))
    expected = torch.tensor([[1.0, -0.5], [0.25, 0.5]])
    actual = expected + torch.tensor([[0.0, moved], [0.0, 0.0]])
    with pytest.raises(ModelError, match="other") if refused else nullcontext():
        probe._compare(model, expected, actual, "gives other logits", rounding)


@torch.inference_mode()
def test_rounding_is_measured_on_the_model_itself():
    """More layers round more often. float32 has room without it."""
    found = {}
    for layers in (2, 16):
        config = LlamaConfig(
            **{**stock_model("llama", 0).config.to_dict(), "num_hidden_layers": layers}
        )
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
        expected = probe._forward(model, [(0, 0, 8)], position_ids=None)
        found[layers] = probe._rounding(model, expected)
    assert 0.003 < found[2] < found[16] < 0.2
    assert 0.0 == probe._rounding(model.float(), expected)
    assert not model.get_input_embeddings()._forward_hooks
