"""Structured answers of a real model: the same with and without jump-forward, however they run.

Alone, batched, sampled `n` times, greedy and by seed, in small chunks, preempted, from the cache.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from functools import cache

import pytest

from engine.engine import Engine
from engine.execution.runner import ModelRunner
from engine.grammar.compiler import compiler_for
from engine.models.load import LoadedModel
from engine.request import FinishReason, Request, SamplingParams, StepOutput
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from engine.structure import Grammar, StructuredOutputs, source_of
from tests.support.models import EOS, tiny_model
from tiers.blocks.keys import CacheScope
from tiers.cache import CacheSettings, TieredCache

BLOCK = 16
PERSON = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 12},
        "is_married": {"type": "boolean"},
        "kind": {"enum": ["person", "company"]},
    },
    "required": ["full_name", "is_married", "kind"],
}
PROMPTS = [list(b"Describe the first person of the table. " * 2), list(b"And the second one: ")]


@cache
def model() -> LoadedModel:
    return tiny_model()


@cache
def person() -> Grammar:
    return compiler_for(model()).compile(source_of(StructuredOutputs(json=PERSON)))


class House:
    """An engine without a thread over the tiny model."""

    def __init__(self, *, jump: bool, blocks: int = 60, step_tokens: int = 64) -> None:
        layout = model().layout(BLOCK)
        self.cache = TieredCache(
            layout, CacheSettings(device_bytes=blocks * layout.nbytes, host_bytes=0)
        )
        scheduler = SchedulerSettings(step_tokens=step_tokens, mixed_step_tokens=step_tokens)
        settings = EngineSettings(
            scheduler=scheduler,
            max_context=1024,
            eos_token_ids=model().eos_token_ids,
            jump_forward=jump,
        )
        runner = ModelRunner(model(), self.cache.pool.tensor, owners=self.cache.pool.owners)
        self.engine = Engine(runner, self.cache, settings, self._take)
        self.outputs: list[StepOutput] = []

    def ask(
        self, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS
    ) -> Mapping[tuple[str, int], tuple[tuple[int, ...], FinishReason | None]]:
        """Tokens and end by prompt and sample."""
        self.outputs.clear()
        for number, prompt in enumerate(prompts):
            self.engine.submit(
                Request(
                    request_id=str(number),
                    tokens=array("i", prompt),
                    params=params,
                    scope=CacheScope(layout=self.cache.layout.digest()),
                    grammar=person(),
                )
            )
        while sum(output.last for output in self.outputs) < len(prompts):
            self.engine.turn()
        self.cache.residency.check()
        names = sorted({(o.request_id, o.index) for o in self.outputs})
        return {name: self._answer(*name) for name in names}

    def _answer(self, name: str, index: int) -> tuple[tuple[int, ...], FinishReason | None]:
        mine = [o for o in self.outputs if (o.request_id, o.index) == (name, index)]
        return tuple(token for o in mine for token in o.tokens), mine[-1].finish

    def _take(self, outputs: Sequence[StepOutput]) -> None:
        self.outputs += outputs


GREEDY = SamplingParams(temperature=0, max_tokens=200)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=200),
        SamplingParams(temperature=0.7, top_p=0.9, seed=1, repetition_penalty=1.3, max_tokens=200),
        SamplingParams(temperature=0, max_tokens=200, min_tokens=150),
        SamplingParams(temperature=0, max_tokens=200, ignore_eos=True),
    ],
    ids=["greedy", "seeded, n=3", "penalised", "min_tokens", "ignore_eos"],
)
def test_an_answer_is_the_same_with_and_without_jump_forward(params: SamplingParams) -> None:
    plain, jumping = House(jump=False), House(jump=True)
    expected = plain.ask(params)
    assert expected == jumping.ask(params)
    assert expected == jumping.ask(params)  # from the cache
    for tokens, finish in expected.values():
        assert FinishReason.STOP is finish
        assert EOS == tokens[-1]
        document = json.loads(bytes(tokens[:-1]))
        assert list(PERSON["properties"]) == list(document)
    jumped = sum(output.num_jumped for output in jumping.outputs)
    assert jumped > 40 * params.n * len(PROMPTS)
    assert jumping.engine.stats().num_steps < plain.engine.stats().num_steps


def test_chunks_preemption_and_small_pools_change_nothing() -> None:
    expected = House(jump=False).ask(GREEDY)
    assert expected == House(jump=True, step_tokens=BLOCK).ask(GREEDY)
    crowded = House(jump=True, blocks=14)
    answers = crowded.ask(GREEDY, PROMPTS * 3)
    assert crowded.engine.stats().num_preemptions > 0
    for (name, index), answer in answers.items():
        assert expected[str(int(name) % 2), index] == answer


def test_the_length_ends_a_forced_run_where_it_is_reached() -> None:
    house = House(jump=True)
    for limit in (1, 5, 20):
        answers = house.ask(SamplingParams(temperature=0, max_tokens=limit))
        for tokens, finish in answers.values():
            assert (limit, FinishReason.LENGTH) == (len(tokens), finish)


def test_logprobs_are_of_every_token_and_so_nothing_is_jumped() -> None:
    house = House(jump=True)
    expected = house.ask(GREEDY)
    params = SamplingParams(temperature=0, max_tokens=200, logprobs=1)
    assert expected == house.ask(params)
    assert 0 == sum(output.num_jumped for output in house.outputs)
    assert all(len(o.tokens) == len(o.logprobs) for o in house.outputs)
