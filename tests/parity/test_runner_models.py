"""The runner against transformers' own forward, for each architecture."""

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from engine.attention.base import PagedAttention, ReferenceAttention
from engine.attention.cpu import CpuAttention
from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from engine.models.load import LoadedModel
from engine.models.packing import PackedLinear, has_bfloat16
from engine.request import SamplingParams
from tests.support.models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    greedy_tokens,
    new_pool,
    stock_model,
    tiny_model,
)

GREEDY = SamplingParams(temperature=0)
BLOCK, NUM_BLOCKS, NEW_TOKENS = 16, 40, 12


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_model(request.param)


def prompt(length: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length, dtype=np.int32)


def stock_tokens(architecture: str, tokens: NDArray[np.int32]) -> list[int]:
    """Greedy tokens of an untouched transformers model."""
    model = stock_model(architecture)
    model.set_attn_implementation("eager")
    return greedy_tokens(model, tokens.tolist(), NEW_TOKENS)


class Sequence:
    """One greedy sequence, fed to a runner in chunks."""

    def __init__(self, number: int, tokens: NDArray[np.int32], first_block: int) -> None:
        self.number = number
        self.tokens = list(tokens)
        self.num_prompt = len(tokens)
        self.computed = 0
        self.table = list(range(first_block, first_block + 10))

    def span(self, count: int) -> Span:
        end = min(len(self.tokens), self.computed + count)
        return Span(
            self.number,
            np.array(self.tokens[self.computed : end], np.int32),
            self.computed,
            self.table,
            end == len(self.tokens),
            GREEDY,
            num_prompt_tokens=self.num_prompt,
        )

    def took(self, span: Span, token: int | None) -> None:
        self.computed += len(span.tokens)
        if token is not None:
            self.tokens.append(token)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


def generate(runner: ModelRunner, sequences: list[Sequence], chunk: int = 1000) -> None:
    """Run all to NEW_TOKENS, together in every step."""
    while live := [s for s in sequences if len(s.generated) < NEW_TOKENS]:
        spans = [sequence.span(chunk) for sequence in live]
        for sequence, span, sampled in zip(live, spans, runner.step(Batch(spans)), strict=True):
            sequence.took(span, sampled.token)


def runner(loaded: LoadedModel, attention: type[ReferenceAttention] | None = None) -> ModelRunner:
    pool = new_pool(loaded, NUM_BLOCKS, BLOCK)
    chosen: PagedAttention | None = attention(pool) if attention else None
    return ModelRunner(loaded, pool, chosen)


def test_warming_up_writes_nothing(loaded):
    pool = new_pool(loaded, 2, BLOCK)
    ModelRunner(loaded, pool).warm_up()
    assert pool.isnan().all()


def test_a_prefix_that_a_short_prompt_left_serves_a_long_one():
    """LongRoPE's border lies at 64: the prefix ends before it, what continues it ends beyond."""
    loaded = tiny_model("phi3")
    tokens = prompt(90)
    cold = Sequence(1, tokens, 0)
    generate(runner(loaded), [cold])
    both = runner(loaded)
    short = Sequence(1, tokens[:40], 0)
    generate(both, [short])
    both.forget(1)
    hit = Sequence(2, tokens, 0)
    hit.computed = 2 * BLOCK
    generate(both, [hit])
    assert hit.generated == cold.generated == stock_tokens("phi3", tokens)


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
    alone = [Sequence(1, tokens, 0) for tokens in prompts]
    for sequence in alone:
        generate(runner(loaded), [sequence])
    together = [Sequence(n, tokens, 10 * n) for n, tokens in enumerate(prompts)]
    generate(fast, together, chunk=2 * BLOCK)
    assert [one.generated for one in together] == [one.generated for one in alone]
    hit = Sequence(5, prompts[1], 10)
    hit.computed = 3 * BLOCK
    generate(fast, [hit])
    assert hit.generated == alone[1].generated
