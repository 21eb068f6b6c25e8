"""Log-probabilities of a prompt are those of a plain forward, however the prompt was computed."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from engine.batch import Batch, Span
from engine.engine import Engine
from engine.execution.runner import ModelRunner
from engine.models.load import LoadedModel
from engine.request import FinishReason, Request, SamplingParams, StepOutput
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tests.support.models import ARCHITECTURES, tiny_model
from tiers.blocks.keys import CacheScope
from tiers.cache import CacheSettings, TieredCache
from tiers.errors import MissReason

BLOCK = 16
PROMPT = list(b"What is asked of a prompt is how likely each of its tokens was, after the others. ")


class House:
    """An engine without a thread over a tiny model; small chunks, so that a prompt is many."""

    def __init__(self, loaded: LoadedModel, *, blocks: int = 40) -> None:
        layout = loaded.layout(BLOCK)
        settings = CacheSettings(device_bytes=blocks * layout.nbytes, host_bytes=0)
        self.cache = TieredCache(layout, settings)
        self.engine = Engine(
            ModelRunner(loaded, self.cache.pool.tensor, owners=self.cache.pool.owners),
            self.cache,
            EngineSettings(
                scheduler=SchedulerSettings(step_tokens=32, mixed_step_tokens=32),
                eos_token_ids=frozenset(),
            ),
            self._take,
        )
        self.outputs: list[StepOutput] = []

    def ask(self, *asked: tuple[Sequence[int], SamplingParams]) -> list[list[StepOutput]]:
        self.outputs.clear()
        for number, (prompt, params) in enumerate(asked):
            scope = CacheScope(layout=self.cache.layout.digest())
            tokens = array("i", prompt)
            self.engine.submit(
                Request(request_id=str(number), tokens=tokens, params=params, scope=scope)
            )
        while sum(output.last for output in self.outputs) < len(asked):
            self.engine.turn()
        self.cache.residency.check()
        return [
            [o for o in self.outputs if o.request_id == str(number)] for number in range(len(asked))
        ]

    def _take(self, outputs: Sequence[StepOutput]) -> None:
        self.outputs += outputs


def expected_logprobs(loaded: LoadedModel, prompt: Sequence[int]) -> list[dict[int, float]]:
    """After each beginning of the prompt, the most likely tokens as a sampling step tells them."""
    house = House(loaded)
    runner = ModelRunner(loaded, house.cache.pool.tensor)
    rows = []
    params = SamplingParams(temperature=0, logprobs=20)
    for end in range(1, len(prompt)):
        tokens = np.array(prompt[:end], dtype=np.int32)
        span = Span(end, tokens, 0, list(range(-(-end // BLOCK))), sample=True, params=params)
        [sampled] = runner.step(Batch([span]))
        assert sampled.logprob is not None
        rows.append(dict(sampled.logprob.top))
        runner.forget(end)
    return rows


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_are_what_a_sampled_token_would_have_had(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the head is done a few rows at a time, beside others that decode."""
    monkeypatch.setattr("engine.execution.runner.LOGITS_BYTES", 5 * 4 * 258)
    loaded = tiny_model(architecture)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=5)
    plain = SamplingParams(temperature=0, max_tokens=20)
    [told, other] = House(loaded).ask((PROMPT, params), (PROMPT[:20], plain))
    [alone] = House(loaded).ask((PROMPT[:20], plain))
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


def test_the_cache_is_not_read_for_them_and_is_filled_by_them() -> None:
    house = House(tiny_model())
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    [first] = house.ask((PROMPT, params))
    [again] = house.ask((PROMPT, params))
    assert first[0].prompt_logprobs == again[0].prompt_logprobs
    assert (0, {MissReason.DISABLED: len(PROMPT) // BLOCK * BLOCK}) == (
        again[0].counts.hit,
        {MissReason.DISABLED: again[0].miss_reasons[MissReason.DISABLED]},
    )
    [plain] = house.ask((PROMPT, SamplingParams(temperature=0, max_tokens=2)))
    assert len(PROMPT) - 1 == plain[0].counts.hit
    assert first[-1].tokens == plain[-1].tokens


@pytest.mark.parametrize("n", [1, 3])
def test_nothing_is_generated_where_nothing_is_asked_for(n: int) -> None:
    house = House(tiny_model())
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, n=n)
    [outputs] = house.ask((PROMPT, params))
    assert [FinishReason.LENGTH] * n == [output.finish for output in outputs]
    assert {()} == {output.tokens for output in outputs}
    assert [len(PROMPT) - 1] + [0] * (n - 1) == [len(o.prompt_logprobs) for o in outputs]
    assert 0 == outputs[-1].counts.output
    [plain] = house.ask((PROMPT, SamplingParams(max_tokens=0)))
    assert len(PROMPT) - 1 == plain[0].counts.hit


def test_a_prompt_of_one_token_has_none() -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    [outputs] = House(tiny_model()).ask(([65], params))
    assert () == outputs[0].prompt_logprobs
