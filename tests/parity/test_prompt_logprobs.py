"""Log-probabilities of a prompt are those of a plain forward, however the prompt was computed."""

import numpy as np
import pytest

from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from engine.request import SamplingParams
from tests.parity.turned import BLOCK, TurnedEngine
from tests.support.models import ARCHITECTURES, tiny_model
from tiers.errors import MissReason

PROMPT = list(b"What is asked of a prompt is how likely each of its tokens was, after the others. ")


def house(loaded):
    """Small chunks, so that a prompt is many."""
    return TurnedEngine(loaded, blocks=40, step_tokens=32)


def expected_logprobs(loaded, prompt):
    """After each beginning of the prompt, the most likely tokens as a sampling step tells them."""
    runner = ModelRunner(loaded, house(loaded).cache.pool.tensor)
    rows = []
    params = SamplingParams(temperature=0, logprobs=20)
    for end in range(1, len(prompt)):
        tokens = np.array(prompt[:end], dtype=np.int32)
        span = Span(end, tokens, 0, list(range(-(-end // BLOCK))), sample=True, params=params)
        [sampled] = runner.step(Batch([span]))
        rows.append(dict(sampled.logprob.top))
        runner.forget(end)
    return rows


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_are_what_a_sampled_token_would_have_had(architecture, monkeypatch):
    """Also where the head is done a few rows at a time, beside others that decode."""
    monkeypatch.setattr("engine.execution.runner.LOGITS_BYTES", 5 * 4 * 258)
    loaded = tiny_model(architecture)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=5)
    plain = SamplingParams(temperature=0, max_tokens=20)
    [told, other] = house(loaded).ask((PROMPT, params), (PROMPT[:20], plain))
    [alone] = house(loaded).ask((PROMPT[:20], plain))
    assert [o.tokens for o in alone] == [o.tokens for o in other]
    entries = told[0].prompt_logprobs
    assert PROMPT[1:] == [entry.token for entry in entries]
    assert not any(output.prompt_logprobs for output in told[1:])
    for entry, row in zip(entries, expected_logprobs(loaded, PROMPT), strict=True):
        assert 5 == len(entry.top)
        best = sorted(row.values(), reverse=True)
        assert [value for _, value in entry.top] == pytest.approx(best[:5], abs=2e-4)
        if entry.token in row:
            assert entry.logprob == pytest.approx(row[entry.token], abs=2e-4)
            assert entry.rank <= 21
        else:
            assert entry.rank > 20


def test_the_cache_is_not_read_for_them_and_is_filled_by_them():
    asked = house(tiny_model())
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    [first] = asked.ask((PROMPT, params))
    [again] = asked.ask((PROMPT, params))
    assert first[0].prompt_logprobs == again[0].prompt_logprobs
    assert (0, {MissReason.DISABLED: len(PROMPT) // BLOCK * BLOCK}) == (
        again[0].counts.hit,
        {MissReason.DISABLED: again[0].miss_reasons[MissReason.DISABLED]},
    )
    [plain] = asked.ask((PROMPT, SamplingParams(temperature=0, max_tokens=2)))
    assert len(PROMPT) - 1 == plain[0].counts.hit
    assert first[-1].tokens == plain[-1].tokens


def test_a_prompt_of_one_token_has_none():
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    [outputs] = house(tiny_model()).ask(([65], params))
    assert () == outputs[0].prompt_logprobs
