"""What requests change in their logits: equal to the rule applied row by row, in few operations."""

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Span
from engine.execution.adjusting import Adjusting, SeenTokens
from engine.request import SamplingParams
from tests.support.torch_calls import Recorder

VOCABULARY = 100  # no multiple of 32


def span(number: int, params: SamplingParams, **fields: Any) -> Span:
    return Span(number, np.zeros(1, np.int32), 1, [0], True, params, **fields)


def by_rule(row: torch.Tensor, one: Span, eos: frozenset[int]) -> None:
    """One row's changes, as their documents say them."""
    params = one.params
    if one.history is not None:
        generated = Counter(one.history[one.num_prompt_tokens :].tolist())
        for token in set(one.history.tolist()):
            if row[token] > 0:
                row[token] /= params.repetition_penalty
            else:
                row[token] *= params.repetition_penalty
        for token, count in generated.items():
            row[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    if one.allowed is not None:
        for token in range(len(row)):
            if not one.allowed[token // 32] >> (token % 32) & 1:
                row[token] = -math.inf
    elif one.sampled_before < params.min_tokens:
        row[[*eos, *params.stop_token_ids]] = -math.inf


tokens = st.integers(0, VOCABULARY - 1)
halves = st.sampled_from([0.0, 0.5, -0.25, 1.5])


@st.composite
def spans(draw: st.DrawFn, number: int) -> Span:
    params = SamplingParams(
        temperature=0,
        presence_penalty=draw(halves),
        frequency_penalty=draw(halves),
        repetition_penalty=draw(st.sampled_from([1.0, 2.0, 0.5])),
        logit_bias=draw(st.none() | st.dictionaries(tokens, halves, max_size=3)) or None,
        min_tokens=draw(st.integers(0, 2)),
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=2, unique=True))),
    )
    history = draw(st.none() | st.lists(tokens, min_size=1, max_size=20))
    masks = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=4, max_size=4)
    mask = draw(st.none() | masks)
    return span(
        number,
        params,
        history=None if history is None else np.array(history, np.int32),
        num_prompt_tokens=draw(st.integers(0, len(history or ()))),
        allowed=None if mask is None else np.array(mask, np.int32),
        sampled_before=1,
    )


@settings(deadline=None)
@given(st.data())
def test_a_step_is_adjusted_as_the_rule_does_row_by_row(data):
    some = [data.draw(spans(number)) for number in range(data.draw(st.integers(1, 5)))]
    logits = torch.randn(len(some), VOCABULARY, generator=torch.Generator().manual_seed(1))
    eos = frozenset({3})
    expected = logits.clone()
    for row, one in zip(expected, some, strict=True):
        by_rule(row, one, eos)
    before = logits.clone()
    torch.testing.assert_close(Adjusting(eos)(logits, some), expected, rtol=0, atol=1e-6)
    assert torch.equal(before, logits), "the caller's logits are left alone"


@given(
    prompt=st.lists(tokens, max_size=8), steps=st.lists(st.lists(tokens, max_size=3), max_size=6)
)
def test_counts_that_follow_a_sequence_are_those_of_its_history(prompt, steps):
    seen, history = SeenTokens(), list(prompt)
    for step in steps:
        history += step
        for _ in range(2):  # a step that failed is computed again
            seen.follow(np.array(history, np.int32), len(prompt))
        generated = Counter(history[len(prompt) :])
        assert sorted(set(history)) == seen.tokens.tolist()
        assert [generated[token] for token in seen.tokens.tolist()] == seen.counts.tolist()


def test_another_sequence_of_the_same_number_is_counted_anew():
    seen = SeenTokens()
    seen.follow(np.array([1, 2, 3, 4], np.int32), 2)
    for history, num_prompt in (([1, 2, 5, 6, 7], 2), ([9], 1), ([1, 2, 5, 6], 1)):
        seen.follow(np.array(history, np.int32), num_prompt)
        assert sorted(history) == seen.tokens.tolist()
        assert len(history) - num_prompt == seen.counts.sum()


def test_a_sequence_that_ended_is_forgotten():
    adjusting = Adjusting(frozenset())
    params = SamplingParams(presence_penalty=1.0)
    history = np.array([1, 2], np.int32)
    adjusting(torch.zeros(1, VOCABULARY), [span(7, params, history=history)])
    assert {7} == set(adjusting._seen)
    adjusting.forget(7)
    assert {} == adjusting._seen


def test_changes_of_64_rows_are_the_operations_of_two():
    """And none of them reads a tensor back."""
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={5: 1.0}, min_tokens=9
    )
    calls = []
    for count in (2, 64):
        history = np.arange(40, dtype=np.int32)
        fields = {"history": history, "num_prompt_tokens": 20}
        some = [span(n, params, **fields) for n in range(count)]
        some[0].allowed = np.full(4, -1, np.int32)
        with Recorder() as recorder:
            Adjusting(frozenset({1}))(torch.zeros(count, VOCABULARY), some)
        del recorder.calls["view"]  # of an array of one element, which no device sees
        calls.append(recorder.calls)
    assert calls[0] == calls[1]
    assert {"_local_scalar_dense", "nonzero"}.isdisjoint(calls[0]), calls[0]
    assert 40 > calls[0].total(), calls[0]
