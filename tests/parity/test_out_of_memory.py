"""A step that runs out of memory is computed in parts, with the KV and the tokens of its parts."""

import weakref

import numpy as np
import pytest
import torch

from engine.batch import Batch, Sampled, Span
from engine.execution.runner import ModelRunner
from engine.execution.shrinking import CALM_STEPS, NO_MEMORY, Shrinking
from engine.request import SamplingParams
from tests.parity import architectures
from tests.support.models import new_pool, tiny_model

BLOCK = 16
PARAMS = SamplingParams(temperature=0)


def span(number, start, count, **fields):
    tokens = np.arange(start, start + count, dtype=np.int32) % 60 + number
    table = list(range(8 * number, 8 * number + 8))
    return Span(number, tokens, start, table, fields.pop("sample", True), PARAMS, **fields)


def small(runner, max_tokens):
    """Lets the model's forward run out of memory above so many tokens; notes what it computed."""
    computed = []
    forward = runner._forward

    def limited(spans):
        count = sum(len(each.tokens) for each in spans)
        if count > max_tokens:
            raise torch.OutOfMemoryError(f"no room for {count} tokens")
        computed.append(count)
        return forward(spans)

    runner._forward = limited
    return computed


def pair():
    loaded = tiny_model()
    pools = [new_pool(loaded, 40) for _ in range(2)]
    return [ModelRunner(loaded, pool) for pool in pools], pools


def test_a_batch_is_halved_until_it_fits_and_long_spans_at_borders_of_blocks():
    (whole, limited), pools = pair()
    spans = [span(0, 0, 70), span(1, 0, 5), span(2, 0, 33), span(3, 0, 21, sample=False)]
    computed = small(limited, 40)
    expected, actual = whole.step(Batch(spans)), limited.step(Batch(spans))
    assert [one.token for one in expected] == [one.token for one in actual]
    assert sum(computed) == 129 and max(computed) <= 40
    torch.testing.assert_close(pools[1], pools[0], rtol=1e-3, atol=1e-4, equal_nan=True)


def test_the_next_steps_do_not_try_what_did_not_fit_until_many_fitted():
    tried = []
    limit = 40

    def compute(spans):
        count = sum(len(each.tokens) for each in spans)
        tried.append(count)
        if count > limit:
            raise torch.OutOfMemoryError
        return [Sampled(each.sequence_id, 1) for each in spans]

    shrinking = Shrinking(BLOCK)
    shrinking(compute, [span(0, 0, 64)])
    assert [64, 32, 32] == tried
    tried.clear()
    for _ in range(CALM_STEPS // 2):
        shrinking(compute, [span(0, 0, 64)])
    assert {32, 64} >= set(tried) and tried.count(64) <= 1
    limit = 1000
    for _ in range(CALM_STEPS):
        shrinking(compute, [span(0, 0, 64)])
    tried.clear()
    shrinking(compute, [span(0, 0, 64)])
    assert [64] == tried


def test_a_sequence_that_cannot_compute_one_block_fails_alone():
    (_, limited), _ = pair()
    small(limited, 3)
    results = limited.step(Batch([span(0, 0, 2), span(1, 0, 20), span(2, 0, 3)]))
    assert [None, NO_MEMORY, None] == [one.error for one in results]
    assert results[0].token is not None and results[2].token is not None


def test_the_parts_have_their_own_targets():
    given = []

    def compute(spans):
        if sum(len(each.tokens) for each in spans) > BLOCK:
            raise torch.OutOfMemoryError
        given.extend(spans)
        return [
            Sampled(
                each.sequence_id,
                7 if each.sample else None,
                targets=() if each.targets is None else tuple(each.targets.tolist()),
            )
            for each in spans
        ]

    whole = span(1, 4, 40, targets=np.arange(30, dtype=np.int32), allowed=np.ones(2, np.int32))
    [result] = Shrinking(BLOCK)(compute, [whole])
    assert 7 == result.token
    assert list(range(30)) == list(result.targets)
    assert [4, 16, 32] == [part.start for part in given]
    assert [False, False, True] == [part.sample for part in given]
    assert [None, None] == [part.allowed for part in given[:2]]


def test_other_errors_are_not_retried():
    def compute(spans):
        raise RuntimeError("another fault")

    with pytest.raises(RuntimeError, match="another fault"):
        Shrinking(BLOCK)(compute, [span(0, 0, 64)])


def test_a_runner_that_nobody_holds_is_freed_without_the_garbage_collector():
    left = weakref.WeakSet(pair()[0])
    assert not left


def test_a_choice_that_runs_out_of_memory_is_made_in_halves_without_computing_again(monkeypatch):
    """The step is computed once."""
    loaded = architectures.served("lfm2")
    pools = [new_pool(loaded, 40) for _ in range(2)]
    whole, limited = (ModelRunner(loaded, pool) for pool in pools)
    choose = limited._sampler.sample

    def small_choice(logits, spans):
        if len(spans) > 1:
            raise torch.OutOfMemoryError(f"no room for {len(spans)} rows")
        return choose(logits, spans)

    monkeypatch.setattr(limited._sampler, "sample", small_choice)
    computed = small(limited, 1000)
    steps = [[span(0, 0, 5), span(1, 0, 7)], [span(0, 5, 9), span(1, 7, 6)], [span(0, 14, 1)]]
    for spans in steps:
        expected, actual = whole.step(Batch(spans)), limited.step(Batch(spans))
        assert [one.token for one in expected] == [one.token for one in actual]
        torch.testing.assert_close(pools[1], pools[0], rtol=1e-3, atol=1e-4, equal_nan=True)
    assert [12, 15, 1] == computed


@pytest.mark.parametrize("model_type", ["lfm2", "lfm3"])
def test_a_step_that_fails_at_its_choice_is_computed_again_from_the_states_before(
    model_type, monkeypatch
):
    """Of several tokens within a block, as a grammar forces them. Their rows replace those that the
    first of them reads."""
    loaded = architectures.served(model_type)
    pools = [new_pool(loaded, 40) for _ in range(2)]
    whole, failing = (ModelRunner(loaded, pool) for pool in pools)
    for runner in (whole, failing):
        runner.step(Batch([span(0, 0, 18)]))
    last = Batch([span(0, 18, 10)])
    expected = whole.step(last)

    def no_choice(logits, spans):
        raise RuntimeError("no choice")

    with monkeypatch.context() as broken:
        broken.setattr(failing._sampler, "sample", no_choice)
        with pytest.raises(RuntimeError, match="no choice"):
            failing.step(last)
    assert expected == failing.step(last)
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


def test_a_sequence_whose_token_alone_cannot_be_chosen_fails_alone(monkeypatch):
    (_, limited), _ = pair()
    choose = limited._sampler.sample

    def broken_choice(logits, spans):
        if any(each.sequence_id == 1 for each in spans):
            raise torch.OutOfMemoryError
        return choose(logits, spans)

    monkeypatch.setattr(limited._sampler, "sample", broken_choice)
    results = limited.step(Batch([span(n, 0, 4) for n in range(3)]))
    assert [None, NO_MEMORY, None] == [one.error for one in results]
