"""DeepSeek's sparse index: index keys beside the latents, and attention to what they pick.

That such models answer as transformers does from every tier is in `test_architectures`.
"""

import logging
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionCall, AttentionOptions, ReferenceAttention
from engine.attention.cpu import CpuAttention
from engine.attention.sparse import IndexRows, SparseAttention, picked
from engine.batch import Span
from engine.execution import runner
from engine.models.load import LoadedModel
from engine.request import SamplingParams
from tests.parity import architectures
from tests.parity.test_architectures import prompt, stock_tokens
from tests.parity.test_engine_tiers import BLOCK, House
from tests.support.models import new_pool
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.memory.device import DevicePool

TOP_K = 6
RANK, DIM, HEADS, INDEX_HEADS, INDEX_DIM = 12, 16, 4, 8, 8
LAYERS = (
    LayerLayout(1, DIM, RANK, shared=True),
    LayerLayout(1, INDEX_DIM, INDEX_DIM, shared=True, picks=TOP_K),
)
TOKENS = 22


@pytest.fixture(params=["deepseek_v32", "glm_moe_dsa", "dots3_note_text"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return architectures.served(request.param)


def test_prompts_of_every_length_answer_as_transformers_does(loaded, tmp_path):
    """Around the number of keys that the index picks, and around blocks: cold and from a hit."""
    top_k = loaded.model.config.index_topk
    tokens = prompt(6 * BLOCK, seed=5)
    with closing(House(loaded, tmp_path, step_tokens=BLOCK)) as house:
        for length in (1, top_k - 9, top_k - 1, top_k, top_k + 1, 2 * BLOCK, 5 * BLOCK + 3):
            expected = stock_tokens(loaded.name.removeprefix("tiny-"), tokens[:length])
            for cache in (False, True, True):
                [(answer, _)] = house.ask([tokens[:length]], cache=cache)
                assert expected == answer


def test_index_keys_are_a_part_of_every_block():
    """Of three layers, the second takes what the first one's index picked, and has no keys."""
    layout = architectures.served("glm_moe_dsa").layout(BLOCK)
    assert [None, None, None, 20, 20] == [layer.picks for layer in layout.layers]
    assert 4 * (3 * 40 + 2 * 16) == layout.token_nbytes


# Picking.


def index_rows(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_tokens, INDEX_HEADS, INDEX_DIM, generator=generator)
    weights = torch.randn(num_tokens, INDEX_HEADS, generator=generator)
    return query, weights, torch.randn(num_tokens, INDEX_DIM, generator=generator)


def test_the_best_keys_are_picked_whatever_is_picked_beside():
    """Whole, in two pieces and one by one; as sorting the scores of each query's own keys does."""
    query, weights, key = index_rows(300, seed=1)
    expected = []
    for place in range(TOP_K, 300):
        scores = (query[place] @ key[: place + 1].t()).relu().mul(weights[place][:, None]).sum(0)
        expected.append(scores.topk(TOP_K).indices.sort().values)
    for borders in ([TOP_K, 300], [TOP_K, 131, 300], range(TOP_K, 301)):
        actual = [
            picked(query[low:high], weights[low:high], key[:high], low, TOP_K)
            for low, high in pairwise(borders)
        ]
        assert torch.equal(torch.stack(expected), torch.cat(actual))


def test_of_equal_scores_the_first_keys_are_picked_in_rows_of_any_length():
    """All keys alike, then all but two. `topk` would pick others in a longer row."""
    query, weights, _ = index_rows(200, seed=2)
    query, weights = query.abs(), weights.abs()
    alike = torch.ones(200, INDEX_DIM)
    for place in (TOP_K, 50, 199):
        row = slice(place, place + 1)
        [chosen] = picked(query[row], weights[row], alike[: place + 1], place, TOP_K)
        assert list(range(TOP_K)) == chosen.tolist()
    better = alike.clone()
    better[[20, 40]] = 2
    chosen = picked(query[100:], weights[100:], better, 100, TOP_K)
    assert [[0, 1, 2, 3, 20, 40]] * 100 == chosen.tolist()


def test_scores_that_are_not_numbers_pick_keys_all_the_same():
    """The answer is not a number either, which is a fault of its sequence alone."""
    query, weights, key = index_rows(40, seed=3)
    query[30] = torch.nan
    chosen = picked(query[20:], weights[20:], key, 20, TOP_K)
    assert (20, TOP_K) == chosen.shape
    assert int(chosen.max()) < 40
    assert list(range(TOP_K)) == chosen[10].tolist()


# Attention.


def span(sequence: int, start: int, count: int, *, write_kv: bool = True) -> Span:
    tokens = np.zeros(count, np.int32)
    table = [[2, 0, 1, 5, 4, 3], [8, 6, 7, 11, 9, 10]][sequence]
    params = SamplingParams(temperature=0)
    return Span(sequence, tokens, start, table, False, params, write_kv=write_kv)


def expected_attention(
    query: torch.Tensor, latent: torch.Tensor, rows: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Over all keys, with a mask made from the sorted scores of each query."""
    index_query, weights, key = rows
    scores = torch.einsum("thd,nd->thn", index_query, key).relu().mul(weights[:, :, None]).sum(1)
    causal = torch.ones(TOKENS, TOKENS).tril().bool()
    scores = scores.masked_fill(~causal, -torch.inf)
    seen = torch.zeros_like(causal).scatter(1, scores.topk(TOP_K).indices, True) & causal
    attended = torch.einsum("thd,nd->htn", query, latent[:, 0]).masked_fill(~seen, -torch.inf)
    return torch.einsum("htn,nd->thd", attended.softmax(-1), latent[:, 0, :RANK])


def attended(
    attention: SparseAttention,
    spans: Sequence[Span],
    query: torch.Tensor,
    latent: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """One step of these spans, which all have the same rows at the same positions."""
    places = torch.cat([torch.arange(s.start, s.start + len(s.tokens)) for s in spans])
    index_query, weights, key = (each[places] for each in rows)
    own = latent[places]
    attention.begin(spans)
    attention.pick(1, IndexRows(index_query, key, weights, TOP_K))
    options = AttentionOptions(scaling=1.0, picked=True)
    output = attention.attend(AttentionCall(0, query[places], own, own[..., :RANK], options))
    attention.finish()
    return output


@pytest.mark.parametrize("kind", [ReferenceAttention, CpuAttention])
def test_any_cut_into_steps_attends_to_what_was_picked(kind):
    """Alone, in chunks on both sides of the border, beside another, and a last token again."""
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(TOKENS, HEADS, DIM, generator=generator)
    latent = torch.randn(TOKENS, 1, DIM, generator=generator)
    rows = index_rows(TOKENS, seed=5)
    expected = expected_attention(query, latent, rows)
    for cuts in ([TOKENS], [4, TOKENS], [TOP_K, TOKENS], [9, 10, TOKENS], range(1, TOKENS + 1)):
        pool = DevicePool(BlockLayout(LAYERS, 4, "float32"), 12)
        pool.tensor.fill_(torch.nan)
        attention = SparseAttention(kind(pool.tensor, LAYERS), pool.tensor, LAYERS)
        for start, end in zip([0, *cuts], cuts, strict=False):
            count = end - start
            spans = [span(0, start, count), span(1, start, count)]
            output = attended(attention, spans, query, latent, rows)
            torch.testing.assert_close(output[:count], expected[start:end])
            assert torch.equal(output[:count], output[count:])
        again = [span(0, TOKENS - 1, 1, write_kv=False)]
        output = attended(attention, again, query, latent, rows)
        torch.testing.assert_close(output, expected[-1:])


# What is refused.


class Unfitting(ReferenceAttention):
    """An attention whose kernel does not fit the GPU."""

    in_place = True

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self.in_place:
            raise RuntimeError("out of shared memory")
        return super().attend(call)

    def give_up_kernel(self, error: Exception) -> None:
        self.in_place = False


def test_a_kernel_that_does_not_fit_is_given_up_by_every_attention_of_a_model(loaded, monkeypatch):
    """dots3.note has one for the layers with an index and one for those with a window."""
    picked_ones: list[Unfitting] = []

    def pick(pool: torch.Tensor, layers: Sequence[LayerLayout], *_: object) -> Unfitting:
        picked_ones.append(Unfitting(pool, layers))
        return picked_ones[-1]

    monkeypatch.setattr(runner, "pick_attention", pick)
    runner.ModelRunner(loaded, new_pool(loaded, 4, BLOCK)).warm_up()
    assert len(picked_ones) == (2 if loaded.name == "tiny-dots3_note_text" else 1)
    assert not any(each.in_place for each in picked_ones)
