"""Sampling: ranges, distributions, and independence from the rest of the batch."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Span
from engine.bounds import check_params
from engine.errors import InvalidParameter
from engine.execution.drawing import candidates, draw, uniform
from engine.execution.sampler import NOT_A_NUMBER, NOTHING_LEFT, Sampler
from engine.request import SamplingParams
from tests.sim.life import REFUSED

VOCAB_SIZE = 64
EOS = 0


def span(params: SamplingParams, **fields: Any) -> Span:
    given = {"sequence_id": 1, "tokens": np.zeros(1, np.int32), "start": 0, "block_table": [0]}
    return Span(**{**given, **fields}, sample=True, params=params)


def sample(logits: torch.Tensor, *spans: Span) -> list[int | None]:
    return [s.token for s in Sampler(frozenset({EOS})).sample(logits, spans)]


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


MORE_REFUSED = [
    *(("temperature", True), ("n", 0), ("n", 1 << 20), ("max_tokens", -1), ("logprobs", 21)),
    *(("repetition_penalty", 11.0), ("frequency_penalty", -2.5), ("logit_bias", {3: 101.0})),
    *(("stop_token_ids", (VOCAB_SIZE,)), ("seed", 0.5)),
    pytest.param("seed", 10**5000, id="a huge seed"),
]


@pytest.mark.parametrize(
    ("field", "value"),
    [*((field, value) for field, each in REFUSED.items() for value in each), *MORE_REFUSED],
)
def test_a_value_out_of_range_names_its_field(field, value):
    with pytest.raises(InvalidParameter, match=field) as caught:
        check_params(SamplingParams(**{field: value}), 50)
    assert caught.value.param == field


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.8),
    SamplingParams(seed=3, top_k=5),
    SamplingParams(seed=4, min_p=0.1, logit_bias={3: 5.0}),
    SamplingParams(seed=5, top_k=9, top_p=0.5, logprobs=2),
]


def test_a_token_does_not_depend_on_the_batch():
    logits = rows(len(MIXED))
    spans = [span(params, sampled_before=7) for params in MIXED]
    together = sample(logits, *spans)
    alone = [sample(logits[i : i + 1], spans[i])[0] for i in range(len(MIXED))]
    backwards = sample(logits.flip(0), *reversed(spans))[::-1]
    assert together == alone == backwards


def test_the_same_seed_repeats_and_positions_differ():
    logits = rows(1).expand(40, -1)
    spans = [span(SamplingParams(seed=9), sampled_before=i) for i in range(40)]
    first = sample(logits, *spans)
    assert first == sample(logits, *spans)
    assert len(set(first)) > 5


def test_without_a_seed_sequences_and_servers_differ():
    logits = torch.zeros(30, VOCAB_SIZE)
    spans = [span(SamplingParams(), sequence_id=i) for i in range(30)]
    first = sample(logits, *spans)
    assert len(set(first)) > 5
    assert first != sample(logits, *spans)


def test_uniform_numbers_are_golden_and_even():
    """The same on every machine: a seed in a request means the same text after an upgrade."""
    assert [uniform(42, position) for position in (0, 1)] == GOLDEN
    numbers = np.array([uniform(7, position) for position in range(4000)])
    assert abs(numbers.mean() - 0.5) < 0.02
    counts = np.histogram(numbers, 20, (0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 50  # chi squared, 19 degrees: p < 1e-4


GOLDEN = [0.34329192209867343, 0.9777767857540063]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=20, top_p=0.7, temperature=1.3),
    ],
)
def test_draws_follow_the_truncated_distribution(params):
    logits = rows(1, seed=3)[0] * 2
    expected = naive_distribution(logits, params)
    count = 3000
    spans = [span(params, sequence_id=i) for i in range(count)]
    drawn = np.bincount(sample(logits.expand(count, -1), *spans), minlength=VOCAB_SIZE)
    assert (drawn[expected == 0] == 0).all()
    live = expected > 0.002
    deviation = np.abs(drawn - count * expected)[live] / np.sqrt(count * expected[live])
    assert deviation.max() < 5


def naive_distribution(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The textbook order: temperature, min_p, top_k, top_p."""
    kept = np.sort(np.exp((logits / params.temperature).double().numpy()))[::-1]
    order = np.argsort(-logits.double().numpy(), kind="stable")
    kept = kept / kept.sum()
    kept[kept < params.min_p * kept[0]] = 0
    if params.top_k:
        kept[params.top_k :] = 0
    kept = kept / kept.sum()
    if params.top_p < 1:
        kept[np.searchsorted(np.cumsum(kept), params.top_p) + 1 :] = 0
    result = np.zeros(VOCAB_SIZE)
    result[order] = kept / kept.sum()
    return result


@pytest.mark.parametrize("scale", [0.0, 0.01, 5.0])
def test_top_p_over_a_large_vocabulary_looks_as_far_as_it_must(scale):
    """Flat rows need more candidates than the first look takes; the answer is the same."""
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.softmax(torch.randn(5000, generator=generator) * scale, -1)
    [weights], _ = candidates(probabilities[None], [SamplingParams(top_p=0.9)])
    kept = weights[weights > 0]
    ordered = probabilities.double().sort(descending=True).values.cumsum(0)
    expected = int((ordered < 0.9 * ordered[-1]).sum()) + 1
    assert abs(len(kept) - expected) <= 1  # float32 sums


def test_a_token_is_chosen_by_adjusted_logits_and_its_logprob_is_of_those_before():
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 5] = 2.0
    params = SamplingParams(temperature=0, logit_bias={8: 2.1}, logprobs=2)
    (chosen,) = Sampler(frozenset()).sample(logits, [span(params)])
    assert chosen.token == 8
    assert chosen.logprob.logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[8]))
    assert chosen.logprob.top[0][0] == 5


HOSTILE_ROWS = {
    "an overflow": torch.tensor([math.inf, *[1.0] * (VOCAB_SIZE - 1)]),
    "two overflows": torch.tensor([math.inf, math.inf, *[-math.inf] * (VOCAB_SIZE - 2)]),
    "the widest": torch.tensor([3.4e38, *[-3.4e38] * (VOCAB_SIZE - 1)]),
    "one left": torch.tensor([0.0, *[-math.inf] * (VOCAB_SIZE - 1)]),
    "all alike": torch.full((VOCAB_SIZE,), -3.4e38),
}


@pytest.mark.parametrize("params", MIXED)
@pytest.mark.parametrize("name", HOSTILE_ROWS)
def test_any_row_with_a_largest_logit_gives_a_token_of_its_own(name, params):
    row = HOSTILE_ROWS[name]
    plain = rows(1)[0]
    wanted = [plain.argmax().item(), plain.argmax().item()]
    greedy = SamplingParams(temperature=0)
    tokens = sample(torch.stack([plain, row, plain]), span(greedy), span(params), span(greedy))
    assert wanted == [tokens[0], tokens[2]]
    assert tokens[1] is not None
    if "all" not in name and not params.logit_bias:
        assert row[tokens[1]] == row.max()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), *MIXED[1:]])
def test_a_row_without_a_largest_logit_is_a_fault_of_its_own(params):
    logits = rows(4)
    logits[1, 7] = math.nan
    logits[2] = -math.inf
    sampler = Sampler(frozenset({EOS}))
    good, not_numbers, nothing, last = sampler.sample(logits, [span(params)] * 4)
    assert (None, NOT_A_NUMBER) == (not_numbers.token, not_numbers.error)
    assert (None, NOTHING_LEFT) == (nothing.token, nothing.error)
    for one, row in ((good, 0), (last, 3)):
        assert one.error is None
        assert [one.token] == sample(logits[row : row + 1], span(params))


def test_a_row_that_needs_a_longer_look_does_not_change_the_others():
    """Flat and steep rows together, over more tokens than the first look takes."""
    generator = torch.Generator().manual_seed(1)
    flat, steep = torch.zeros(5000), torch.randn(5000, generator=generator) * 8
    params = [SamplingParams(seed=seed, top_p=0.9) for seed in range(6)]
    logits = torch.stack([flat, steep] * 3)
    together = sample(logits, *map(span, params))
    assert together == [sample(logits[i : i + 1], span(params[i]))[0] for i in range(6)]


def test_logits_that_move_by_rounding_draw_the_same_tokens():
    """Among many nearly equal logits the order by likelihood changes; the draws must not."""
    torch.manual_seed(3)
    logits = torch.randn(50, 20_000)
    moved = logits + torch.randn(50, 20_000) * 1e-5
    numbers = torch.rand(50).tolist()
    for params in (SamplingParams(top_p=0.95), SamplingParams(top_k=800), SamplingParams()):
        drawn = draw(logits, [params] * 50, numbers)
        assert drawn.tolist() == draw(moved, [params] * 50, numbers).tolist()
