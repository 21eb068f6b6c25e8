"""A recorded forward computes the bits of the model's own, or is not used."""

import logging
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from engine.attention.copies import WorkingCopies
from engine.batch import Batch, Span
from engine.execution import fusing
from engine.execution.runner import ModelRunner
from engine.execution.traced import TracedForward, Untraceable, trace
from engine.models.load import load_adapter
from engine.models.packing import PackedLinear
from engine.promise import BITS, Equal
from engine.request import SamplingParams
from tests.parity import architectures
from tests.support.models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    described,
    new_pool,
    save_tiny_adapter,
    tiny_model,
)

BLOCK = 16


def span(sequence_id, start, count, first_block, **fields):
    rng = np.random.default_rng(1000 * sequence_id + start)
    tokens = rng.integers(0, VOCAB_SIZE, count, dtype=np.int32)
    table = list(range(first_block, first_block + 10))
    return Span(sequence_id, tokens, start, table, True, SamplingParams(temperature=0), **fields)


STEPS = [
    [span(1, 0, 37, 0)],  # cold
    [span(1, 37, 1, 0), span(2, 0, 20, 10)],  # a decoded token beside a prompt
    [span(n, 37 if n == 1 else 20, 1, 10 * n - 10) for n in (1, 2)],
    [span(3, 32, 5, 0), span(2, 21, 1, 10)],  # a hit
    [span(4, 36, 1, 0, write_kv=False)],  # a whole prompt again
]


def runner(loaded):
    torch.manual_seed(0)
    return ModelRunner(loaded, new_pool(loaded, 40, BLOCK))


def forward(runner, step):
    logits, _ = runner._forward(step)
    runner._attention.finish()
    return logits


def two_runners(loaded):
    """Over equal pools."""
    pools = [new_pool(loaded, 40, BLOCK) for _ in range(2)]
    pools[1].copy_(pools[0])
    return ModelRunner(loaded, pools[0]), ModelRunner(loaded, pools[1]), pools


def check_logits(own, other, *steps):
    """Both compute the same bits, by default in all steps."""
    for step in steps or STEPS:
        with torch.inference_mode():
            expected, actual = forward(own, step), forward(other, step)
        assert torch.equal(expected, actual)


def check_kv(pools):
    assert torch.equal(*(pool.nan_to_num(7) for pool in pools)), "nobody's blocks hold NaN"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_kv_are_those_of_the_models_own_forward(architecture, fused, operators):
    loaded = tiny_model(architecture)
    own, traced, pools = two_runners(loaded)
    traced._traced = TracedForward(loaded.model, fused=fused)
    if fused:
        traced._picked.fuse()
    check_logits(own, traced)
    check_kv(pools)


def test_recording_unpacks_no_weight():
    """A plain copy of each would hold the whole model in memory a second time."""
    model = tiny_model("llama").model
    assert trace(model) is not None
    packed = [each for each in model.modules() if isinstance(each, PackedLinear)]
    assert packed and all(each._plain is None for each in packed)


def test_a_context_shorter_than_the_check_is_not_recorded():
    """Of learned positions there are no more than the context has."""
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    short = runner(described("short", stock))
    short.warm_up()
    assert short._traced is None


GREEDY = SamplingParams(temperature=0)
LONG = np.random.default_rng(7).integers(0, VOCAB_SIZE, 560, dtype=np.int32)


def computed(warm, *cuts):
    """Compute the long prompt in chunks that end there, none of which samples."""
    for start, end in pairwise((0, *cuts)):
        warm.step(Batch([Span(1, LONG[start:end], start, list(range(35)), False, GREEDY)]))
    warm.forget(1)


def test_chunks_that_sample_nothing_do_not_depend_on_threads(operators, threads):
    """torch divides an activation among its threads, here 501 rows of 96 numbers, and computes the
    last numbers of each share by another function. An operator does not."""
    loaded = replace(tiny_model("llama"), operators=operators)
    pools = [new_pool(loaded, 35, BLOCK) for _ in range(2)]
    threads(2)
    for pool, cuts in zip(pools, ((501, 560), (77, 300, 501, 560)), strict=True):
        warm = ModelRunner(loaded, pool)
        warm.warm_up()
        computed(warm, *cuts)
    assert torch.equal(*pools)


@pytest.mark.parametrize(
    ("architecture", "by_row"),
    [
        *((name, True) for name in ("llama", "granite", "gemma3_text", "gemma2", "glm", "phi3")),
        ("starcoder2", False),
    ],
)
def test_operators_activate_each_row_alone(architecture, by_row, operators):
    """The second model divides its logits, the fourth caps them, and the next two have calls that
    change no number, or choose a table. The last one's activation is another than an operator's."""
    loaded = architectures.served(architecture)
    own, fused = runner(loaded), runner(replace(loaded, operators=operators))
    assert not fused.activates_by_row, "nothing is recorded yet"
    own.record()
    fused.record()
    assert not own.activates_by_row and fused.activates_by_row is by_row


@pytest.fixture
def narrow(operators):
    """A model whose linear layers are all narrow."""
    return narrow_model(operators)


def narrow_model(operators, *, width=96, **fields):
    """The same, with this number of gates."""
    sizes = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": width}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"max_position_embeddings": 1024, "initializer_range": 0.2, **fields}
    config = LlamaConfig(**sizes, **heads, **more)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in stock.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return described("narrow", stock, operators=operators)


def test_operators_are_not_compared_with_what_threads_divide(operators, threads):
    """Of 37 rows of 1,792 gates, torch gives three threads shares that end within its vectors."""
    threads(3)
    loaded = narrow_model(operators, width=1792)
    warm = runner(loaded)
    warm.record()
    assert warm.activates_by_row
    assert loaded.promise(activated_by_row=True) == BITS
    assert loaded.promise(activated_by_row=False).equal is Equal.TOKENS


def test_one_row_alone_has_the_bits_that_it_has_beside_another(narrow, monkeypatch):
    alone, beside, pools = two_runners(narrow)
    for each in (alone, beside):
        each.record()
    assert alone._traced.computes_one_row
    beside._traced.computes_one_row = False
    sizes, run = [], alone._traced._graph

    def graph(rows, *others):
        sizes.append((rows.shape[1], len(others[1])))
        return run(rows, *others)

    monkeypatch.setattr(alone._traced, "_graph", graph)
    check_logits(beside, alone, *STEPS, [span(1, 38, 1, 0)])
    check_kv(pools)
    assert sizes == [(37, 1), (21, 2), (2, 2), (6, 2), (1, 1), (1, 1)]


@pytest.mark.parametrize("dim", [192, 256, 512])
def test_wide_heads_have_the_bits_of_the_models_own_forward(dim, operators):
    """Whether the operator attends them or not, which depends on the processor."""
    own, fused, pools = two_runners(narrow_model(operators, head_dim=dim))
    fused.record()
    check_logits(own, fused)
    check_kv(pools)


def test_packed_layers_compute_two_rows_at_least(operators):
    packed = runner(replace(tiny_model("llama"), operators=operators))
    packed.record()
    assert packed.activates_by_row
    assert packed._traced is not None and not packed._traced.computes_one_row
    assert packed._fewest([span(1, 0, 1, 0)]) == 2


def test_a_row_of_an_adapter_is_computed_with_another(narrow):
    """Its updates are packed layers."""
    warm = runner(narrow)
    warm.record()
    assert warm._fewest([span(1, 0, 1, 0)]) == 1
    assert warm._fewest([span(1, 0, 1, 0), span(2, 0, 1, 10, adapter="any")]) == 2


def test_one_row_that_differs_is_computed_with_another(narrow, monkeypatch):
    own = TracedForward.__call__

    def run(traced, keep, *, input_ids, **given):
        logits, output = own(traced, keep, input_ids=input_ids, **given)
        return (logits + 1e-6 if input_ids.shape[1] == 1 else logits), output

    monkeypatch.setattr(TracedForward, "__call__", run)
    assert not TracedForward(narrow.model, fused=True).computes_one_row


def test_no_step_of_a_warm_runner_is_computed_by_the_models_own_layers(narrow):
    """Neither chunks that sample nothing, of which no row is needed after the last attention, nor
    prompts with log-probabilities, which need all."""
    own, warm = runner(narrow), runner(narrow)
    warm.warm_up()
    assert warm._traced.leaves_rows and _kinds(warm._traced)["aten::index_select"] == 2
    asked = span(1, 0, 20, 0, targets=np.arange(20, dtype=np.int32))
    steps = [replace(asked, sample=False), replace(span(1, 20, 9, 0), sample=False)]
    steps += [span(1, 29, 8, 0, targets=np.arange(8, dtype=np.int32))]
    told = [own.step(Batch([step])) for step in steps]

    def burn(*_, **__):
        raise Burning("the model's own layers")

    with pytest.MonkeyPatch.context() as patch:
        for layer in narrow.model.base_model.layers:
            patch.setattr(layer, "forward", burn)
        assert [warm.step(Batch([step])) for step in steps] == told


class Burning(Exception):
    """What goes wrong in one layer."""


def test_an_error_in_attention_comes_out_as_it_is():
    """Not as TorchScript's, whose message is pages of paths; and the next step serves."""
    loaded = tiny_model("llama")
    warm = runner(loaded)
    warm.warm_up()
    attend = warm._attention.attend

    def burn(call):
        if call.layer == 1:
            raise Burning("layer 1")
        return attend(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm._attention, "attend", burn)
        patch.setattr(warm._attention, "inside_step", lambda: None)
        with pytest.raises(Burning, match=r"^layer 1$"):
            warm.step(Batch(STEPS[0]))
    told = [[each.token for each in r.step(Batch(STEPS[0]))] for r in (runner(loaded), warm)]
    assert told[0] == told[1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_with_working_copies_does_not_return_to_python(architecture):
    loaded = tiny_model(architecture)
    own, warm, _ = two_runners(loaded)
    warm._traced = TracedForward(loaded.model)

    def burn(call):
        raise Burning(f"layer {call.layer}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm._attention, "attend", burn)
        check_logits(own, warm)


def test_a_step_without_room_for_a_copy_goes_back_to_python_and_the_next_does_not():
    loaded = tiny_model("llama")
    own, warm = runner(loaded), runner(loaded)
    warm._traced, seen = TracedForward(loaded.model), 0
    attend = warm._attention.attend

    def count(call):
        nonlocal seen
        seen += 1
        return attend(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm._attention, "attend", count)
        for number, step in enumerate(STEPS):
            before = seen
            with pytest.MonkeyPatch.context() as full:
                if number % 2:
                    full.setattr(WorkingCopies, "open", lambda self, span, busy: None)
                check_logits(own, warm, step)
            assert (seen > before) == bool(number % 2)


def test_a_step_with_an_adapter_is_computed_with_it(tmp_path):
    loaded = tiny_model("llama")
    plain, traced = runner(loaded), runner(loaded)
    traced._traced = TracedForward(loaded.model)
    save_tiny_adapter(tmp_path)
    load_adapter(loaded, "own", str(tmp_path))
    mixed = [span(1, 9, 1, 0, adapter="own"), span(2, 0, 5, 10)]
    check_logits(plain, traced, [span(1, 0, 9, 0, adapter="own")], mixed, [span(2, 5, 1, 10)])


@pytest.mark.parametrize("model_type", ["lfm2", "jetmoe", "longcat_flash"])
def test_a_model_that_keeps_states_or_branches_on_tensors_is_not_recorded(model_type, caplog):
    caplog.set_level(logging.INFO)
    assert trace(architectures.served(model_type).model) is None
    assert "is not recorded" in caplog.text


class Counting(nn.Module):
    """A model whose result depends on something that no graph sees."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.calls = 0

    @property
    def base_model(self):
        return self.model.base_model

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def forward(self, **given):
        self.calls += 1
        output = self.model(**given)
        output.logits = output.logits + self.calls
        return output


def test_a_graph_that_gives_other_bits_is_refused():
    model = Counting(tiny_model("llama").model)
    with pytest.raises(Untraceable, match="the logits of 2 tokens are others"):
        TracedForward(model)


def test_operators_take_the_place_of_every_norm_rotation_and_activation(operators):
    kinds = _kinds(trace(tiny_model("llama").model, fused=True))
    layers = 3
    expected = {"norm": 2 * layers + 1, "rotate": 2 * layers, "silu_mul": layers}
    assert {name: kinds[f"cachesvc::{name}"] for name in expected} == expected
    assert not kinds["aten::pow"] + kinds["aten::silu"] + kinds["aten::neg"]


def _kinds(traced):
    """The calls of a recorded forward."""
    return Counter(node.kind() for node in traced._graph.graph.nodes())


def test_operators_that_give_other_bits_are_not_used(operators, monkeypatch, caplog):
    pattern, replacement = fusing._PATTERNS["norm"]
    norm = "%normed = cachesvc::norm(%x, %eps)"
    other = pattern, replacement.replace(norm, "%normed = aten::mul(%x, %eps)")
    monkeypatch.setitem(fusing._PATTERNS, "norm", other)
    with caplog.at_level(logging.INFO):
        assert trace(tiny_model("llama").model, fused=True) is not None
    assert "the compiled operators are not used: the logits of 2 tokens are others" in caplog.text


def test_activations_that_end_within_torchs_vectors_are_left_to_it(operators, monkeypatch):
    """Rows of 96 numbers, and vectors of 64."""
    monkeypatch.setattr(fusing, "_VECTORS", 64)
    kinds = _kinds(TracedForward(tiny_model("llama").model, fused=True))
    named = ("aten::silu", "cachesvc::silu_mul", "cachesvc::norm")
    assert (3, 0, 7) == tuple(kinds[kind] for kind in named)
