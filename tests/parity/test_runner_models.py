"""The runner against transformers' own forward, for each architecture."""

import numpy as np
import pytest
import xxhash

from engine.attention.cpu import CpuAttention
from engine.execution.runner import ModelRunner
from engine.models.packing import PackedLinear, has_bfloat16
from tests.support.models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    generated,
    greedy_tokens,
    new_pool,
    stock_model,
    tiny_model,
)

BLOCK, NUM_BLOCKS, NEW_TOKENS = 16, 40, 12


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(request):
    return tiny_model(request.param)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length, dtype=np.int32)


def stock_tokens(architecture, tokens):
    """Greedy tokens of an untouched transformers model."""
    model = stock_model(architecture)
    model.set_attn_implementation("eager")
    return greedy_tokens(model, tokens.tolist(), NEW_TOKENS)


def runner(loaded):
    return ModelRunner(loaded, new_pool(loaded, NUM_BLOCKS, BLOCK))


def test_warming_up_writes_nothing(loaded):
    pool = new_pool(loaded, 2, BLOCK)
    ModelRunner(loaded, pool).warm_up()
    assert pool.isnan().all()


def test_a_prefix_that_a_short_prompt_left_serves_a_long_one():
    """LongRoPE's border lies at 64: the prefix ends before it, what continues it ends beyond."""
    loaded = tiny_model("phi3")
    tokens = prompt(90)
    cold = generated(runner(loaded), [tokens], NEW_TOKENS)
    both = runner(loaded)
    generated(both, [tokens[:40]], NEW_TOKENS)
    hit = generated(both, [tokens], NEW_TOKENS, computed=2 * BLOCK, number=2)
    assert hit == cold == [stock_tokens("phi3", tokens)]


def test_the_table_is_part_of_the_weights_digest():
    """KV that an earlier release kept was turned by either table; it must not be found."""
    digests = {tiny_model(name).weights_digest for name in ("llama", "phi3")}
    assert xxhash.xxh3_128_digest(b"tiny-llama-0") in digests
    assert xxhash.xxh3_128_digest(b"tiny-phi3-0") not in digests


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_bfloat16_on_a_cpu_is_packed_attends_fast_and_is_the_same_in_any_company(architecture):
    loaded = tiny_model(architecture, dtype="bfloat16")
    packed = [module for module in loaded.model.modules() if isinstance(module, PackedLinear)]
    assert bool(packed) == has_bfloat16()
    fast = runner(loaded)
    assert isinstance(fast._attention, CpuAttention)
    prompts = [prompt(length, seed=length) for length in (33, 90)]
    alone = [generated(runner(loaded), [tokens], NEW_TOKENS)[0] for tokens in prompts]
    assert alone == generated(fast, prompts, NEW_TOKENS, chunk=2 * BLOCK)
    table = list(range(10, 20))
    computed = {"computed": 3 * BLOCK, "tables": [table], "number": 5}
    assert [alone[1]] == generated(fast, prompts[1:], NEW_TOKENS, **computed)
