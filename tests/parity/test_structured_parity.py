"""Structured answers of a real model: the same with and without jump-forward, however they run.

Batched, sampled `n` times, greedy and by seed, and from the cache.
"""

import json
from functools import cache

import pytest

from engine.grammar.compiler import compiler_for
from engine.request import FinishReason, SamplingParams
from engine.structure import StructuredOutputs, source_of
from tests.parity.turned import TurnedEngine
from tests.support.models import EOS, tiny_model

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
def model():
    return tiny_model()


@cache
def person():
    return compiler_for(model()).compile(source_of(StructuredOutputs(json=PERSON)))


class House(TurnedEngine):
    """Answers about persons."""

    def __init__(self, *, jump):
        ends = {"eos_token_ids": model().eos_token_ids, "jump_forward": jump}
        super().__init__(model(), max_context=1024, **ends)

    def told(self, params):
        """Tokens and end by prompt and sample."""
        self.ask(*((prompt, params) for prompt in PROMPTS), grammar=person())
        answers = {}
        for output in self.outputs:
            tokens, _ = answers.get((output.request_id, output.index), ((), None))
            answers[output.request_id, output.index] = tokens + output.tokens, output.finish
        return answers


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
def test_an_answer_is_the_same_with_and_without_jump_forward(params):
    plain, jumping = House(jump=False), House(jump=True)
    expected = plain.told(params)
    assert expected == jumping.told(params)
    assert expected == jumping.told(params)  # from the cache
    for tokens, finish in expected.values():
        assert FinishReason.STOP is finish
        assert EOS == tokens[-1]
        document = json.loads(bytes(tokens[:-1]))
        assert list(PERSON["properties"]) == list(document)
    jumped = sum(output.num_jumped for output in jumping.outputs)
    assert jumped > 40 * params.n * len(PROMPTS)
    assert jumping.engine.stats().num_steps < plain.engine.stats().num_steps


def test_logprobs_are_of_every_token_and_so_nothing_is_jumped():
    house = House(jump=True)
    expected = house.told(GREEDY)
    params = SamplingParams(temperature=0, max_tokens=200, logprobs=1)
    assert expected == house.told(params)
    assert 0 == sum(output.num_jumped for output in house.outputs)
    assert all(len(o.tokens) == len(o.logprobs) for o in house.outputs)
