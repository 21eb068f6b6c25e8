"""Models with recurrent states answer exactly as transformers does, however they are served."""

import logging
from contextlib import closing
from inspect import Parameter, Signature

import pytest
import torch
from torch import nn

from engine.attention import recurrent
from tests.parity import architectures
from tests.parity.test_architectures import prompt, stock_tokens
from tests.support.house import BLOCK, NUM_OUT, House, from_every_tier
from tiers.policy.checkpoints import worth_blocks


@pytest.fixture(params=sorted(architectures.RECURRENT))
def loaded(request):
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of kernels that are not installed
    return architectures.served(request.param)


def generated_tokens(model_type, tokens):
    """What transformers generates from its own cache of states."""
    model = architectures.stock(model_type)
    model.generation_config.eos_token_id = None
    given = torch.tensor([tokens])
    mask = torch.ones_like(given)
    generated = model.generate(
        given, attention_mask=mask, do_sample=False, max_new_tokens=NUM_OUT, pad_token_id=0
    )
    return generated[0, len(tokens) :].tolist()


def test_tokens_are_those_of_transformers_cold_and_from_every_tier(loaded, tmp_path):
    tokens = prompt(4 * BLOCK + 11, seed=1)
    model_type = loaded.name.removeprefix("tiny-")
    expected = stock_tokens(model_type, tokens)
    assert expected == generated_tokens(model_type, tokens)

    def next_turn(house):
        longer = tokens + expected + prompt(20, seed=4)
        [(turn, counts)] = house.ask([longer])
        assert stock_tokens(model_type, longer) == turn
        layout = house.cache.layout
        pays = worth_blocks(layout.checkpoint.nbytes, layout.nbytes) == 1
        assert (5 if pays else 4) * BLOCK == counts.hit_device  # the answer before it has one block

    answers, hits = from_every_tier(
        lambda: House(loaded, tmp_path, step_tokens=2 * BLOCK),
        lambda house, **asked: house.ask([tokens], **asked),
        next_turn,
    )
    assert [expected] * 6 == answers
    assert [0, 0] + [4 * BLOCK] * 4 == hits
    assert architectures.row(loaded) in architectures.PAGE.read_text(encoding="utf-8").splitlines()


def test_prompts_that_part_anywhere_resume_where_they_parted(tmp_path):
    """At the second sight the prompt's own part is computed; a third one resumes there."""
    loaded = architectures.served("qwen3_next")
    trunk = prompt(6 * BLOCK, seed=1)
    with closing(House(loaded, tmp_path, device_blocks=200, step_tokens=2 * BLOCK)) as house:
        house.ask([trunk + prompt(20, seed=2)])
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 7, 6 * BLOCK):
            shared = length // BLOCK * BLOCK
            for seed in (3, 4, 5):
                asked = trunk[:length] + prompt(25, seed=seed + 10 * length)
                [(expected, _)] = house.ask([asked], cache=False)
                [(answer, counts)] = house.ask([asked])
                assert expected == answer
                if seed > 3:
                    assert shared == counts.hit


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba"])
def test_samples_of_one_prompt_continue_its_states(kind, tmp_path):
    tokens = prompt(2 * BLOCK + 5, seed=1)
    loaded = architectures.served(kind)
    with closing(House(loaded, tmp_path, step_tokens=2 * BLOCK)) as house:
        [(expected, _)] = house.ask([tokens], cache=False)
        for cache in (False, True, True):
            [(answers, _)] = house.ask([tokens], n=5, cache=cache)
            assert expected * 5 == answers


@pytest.mark.parametrize("name", ["cache_params", "past_key_values", "cache"])
def test_a_module_gets_the_states_under_the_name_that_it_has_for_them(name):
    """transformers 5.24 renamed both names, and ignores what it does not know."""
    given = []

    def forward(self, hidden_states, **named):
        given.append(named.get(name))
        return hidden_states

    known = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD, default=None)
             for each in ("self", "hidden_states", name)]  # fmt: skip
    ignored = Parameter("kwargs", Parameter.VAR_KEYWORD)
    forward.__signature__ = Signature([*known, ignored])
    port = recurrent.StatePort()
    port.states = recurrent.RecurrentStates()
    port.states.begin([recurrent.Piece(sequence_id=0, start=0, num_tokens=3)])
    module = type("Module", (nn.Module,), {"forward": forward})()
    recurrent.RecurrentForward(module, port)(torch.zeros(1, 3, 2))
    assert isinstance(given[0], recurrent.StateCache)
