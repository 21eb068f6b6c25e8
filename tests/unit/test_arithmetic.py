"""Blocks are shared only where a processor, device and version compute the same bits."""

import json
import os
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from cachesvc.config.sections import ModelSection
from cachesvc.config.vllm import vllm_environment
from cachesvc.operator.scopes import FILE_NAME, other_arithmetics
from cachesvc.server.compute import _tell
from engine.attention.base import KEPT
from engine.attention.latent import ByHead, LatentAttention
from engine.errors import ModelError
from engine.models import arithmetic
from engine.models.arithmetic import Arithmetic, arithmetic_of
from engine.models.load import load_adapter
from engine.promise import BITS, Equal, Promise
from engine.scheduling.lookup import computed_otherwise
from tests.support.models import save_tiny_adapter, tiny_model
from tests.unit.test_elementwise import gates, with_vectors
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope


def test_the_same_machine_has_one_arithmetic_for_any_number_of_threads(threads):
    loaded = tiny_model()
    threads(2)
    again = arithmetic_of(loaded.model, "cpu")
    # What activations leave equal may be less: torch cuts them into shares for its threads.
    assert replace(again, activations=BITS) == replace(loaded.arithmetic, activations=BITS)
    assert dict(again.names)["torch"] == torch.__version__


def test_all_that_moves_bits_is_in_the_digest():
    mine = Arithmetic((("torch", "2.13"), ("capability", "AVX512")), b"bits")
    others = [
        Arithmetic((("torch", "2.14"), ("capability", "AVX512")), b"bits"),
        Arithmetic((("torch", "2.13"), ("capability", "AVX2")), b"bits"),
        Arithmetic(mine.names, b"bite"),
        replace(mine, activations=Promise(Equal.TOKENS, "with 3 threads, they depend")),
    ]
    assert len({each.digest(activated_by_row=False) for each in (mine, *others)}) == 5
    moved = others[-1]
    assert mine.digest(activated_by_row=True) == moved.digest(activated_by_row=True)


def test_another_kernel_gives_another_arithmetic(monkeypatch):
    loaded = tiny_model()

    def summed_backwards(rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        whole = packed.to_dense()
        return (rows[:, None, :].flip(-1) * whole.flip(-1)).sum(-1)

    kind = arithmetic.PackedLinear
    monkeypatch.setattr(kind, "forward", lambda self, rows: summed_backwards(rows, self._packed))
    digests = [
        each.digest(activated_by_row=True)
        for each in (arithmetic_of(loaded.model, "cpu"), loaded.arithmetic)
    ]
    assert digests[0] != digests[1]


def test_a_processor_is_named_by_model_and_vectors_not_by_its_clock(tmp_path):
    info = tmp_path / "cpuinfo"
    text = "vendor_id\t: AuthenticAMD\nmodel\t\t: 2\ncpu MHz\t: {}\nflags\t: fpu avx2 sse4_1 {}\n\n"
    info.write_text(text.format(2100, "tsc") + "vendor_id\t: another\n")
    first = dict(arithmetic._processor(info))
    info.write_text(text.format(3000, "constant_tsc"))
    assert dict(arithmetic._processor(info)) == first
    assert first == {"vendor_id": "AuthenticAMD", "model": "2", "vectors": "avx2 sse4_1"}


def test_a_directory_of_an_older_version_lists_its_arithmetic_as_another(tmp_path):
    mine = CacheScope(weights=b"w", arithmetic=b"now")
    assert other_arithmetics(tmp_path, mine) == ()
    old = {name: value.hex() for name, value in asdict(mine).items() if name != "arithmetic"}
    other = {name: value.hex() for name, value in asdict(replace(mine, arithmetic=b"b")).items()}
    stranger = {**other, "weights": b"other".hex()}
    recorded = [{"model": "m", "scope": scope} for scope in (old, other, stranger)]
    (tmp_path / FILE_NAME).write_text(json.dumps(recorded))
    assert other_arithmetics(tmp_path, mine) == (b"b", b"")


def test_a_prompts_first_block_is_found_under_another_arithmetic():
    mine, theirs = CacheScope(weights=b"w", arithmetic=b"1"), CacheScope(weights=b"w")
    chain, other = (Chain(scope.root(), range(10), 4) for scope in (mine, theirs))
    assert list(computed_otherwise(chain, mine, [b""])) == [other.block_id(0)]
    assert not list(computed_otherwise(Chain(mine.root(), range(3), 4), mine, [b""]))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.ModuleDict({"experts": nn.Linear(2, 2)}), "experts"),
        (nn.Conv1d(2, 2, 3), "recurrent"),
        (nn.Linear(2, 2), "Linear are not packed"),
        (Conv1D(2, 2), "Conv1D are not packed"),  # GPT-2's linear layers
    ],
)
def test_a_layer_that_is_not_packed_leaves_greedy_tokens_alone(layer, why):
    model = nn.ModuleDict({"table": nn.Embedding(2, 2), "layer": layer})
    promise = arithmetic_of(model, "cpu").promise
    assert promise.equal is Equal.TOKENS and why in promise.reason
    assert arithmetic_of(nn.ModuleDict({"table": nn.Embedding(2, 2)}), "cpu").promise == BITS


def test_adapters_and_another_dtype_leave_greedy_tokens_alone(tmp_path):
    assert tiny_model(dtype="float16").promise(activated_by_row=True).equal is Equal.TOKENS
    loaded = tiny_model()
    save_tiny_adapter(tmp_path)
    load_adapter(loaded, "lora", str(tmp_path))
    promise = loaded.promise(activated_by_row=True)
    assert promise.equal is Equal.TOKENS and "adapters" in promise.reason


def test_the_weaker_of_two_promises_counts_and_its_text_says_why():
    tokens, none = Promise(Equal.TOKENS, "one reason"), Promise(Equal.NONE, "another")
    assert BITS.or_weaker(tokens) == tokens.or_weaker(BITS) == tokens
    assert tokens.or_weaker(none) == none.or_weaker(tokens) == none
    assert "one reason" in tokens.text and "another" in none.text


def test_rows_that_depend_on_their_number_are_not_promised(monkeypatch):
    loaded = tiny_model()
    monkeypatch.setattr(
        arithmetic.PackedLinear, "forward", lambda self, rows: rows.sum() + rows[:, :1]
    )
    promise = arithmetic_of(loaded.model, "cpu").promise
    assert promise.equal is Equal.NONE and "number of rows" in promise.reason


def test_products_with_latents_that_depend_on_the_rows_are_not_promised(monkeypatch):
    model = nn.Module()
    setattr(model, KEPT, LatentAttention(torch.ones(2, 4, 8), torch.ones(2, 4, 8)))
    assert arithmetic_of(model, "cpu").promise == BITS
    monkeypatch.setattr(ByHead, "__call__", lambda _, rows: rows.sum() + rows)
    promise = arithmetic_of(model, "cpu").promise
    assert promise.equal is Equal.NONE and "latents" in promise.reason


def test_a_start_that_must_be_exact_is_refused_with_the_reason():
    always, weaker = ModelSection(exact="always"), Promise(Equal.TOKENS, "a reason")
    _tell(BITS, always)
    _tell(weaker, ModelSection())
    with pytest.raises(ModelError, match="a reason"):
        _tell(weaker, always)


def test_vllm_is_started_in_its_batch_invariant_mode(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    assert "VLLM_BATCH_INVARIANT" not in vllm_environment(exact=False)
    assert vllm_environment(exact=True)["VLLM_BATCH_INVARIANT"] == "1"


@with_vectors
def test_bits_are_not_promised_where_an_activation_depends_on_the_rows_beside():
    """torch computes the last numbers of each thread's share by other functions than the rest."""
    loaded = tiny_model()
    told = arithmetic_of(loaded.model, "cpu", [gates(64)]).activations
    assert told == BITS
    told = arithmetic_of(loaded.model, "cpu", [gates(64), gates(72)]).activations
    assert told.equal is Equal.TOKENS
    cut = replace(loaded, arithmetic=replace(loaded.arithmetic, activations=told))
    assert cut.promise(activated_by_row=False) == told
    assert cut.promise(activated_by_row=True) == BITS
    assert "activations of 72 numbers depend on the rows beside" in told.reason
