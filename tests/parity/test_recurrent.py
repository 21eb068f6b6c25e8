"""Models with recurrent states answer exactly as transformers does, however they are served."""

import logging
from inspect import Parameter, Signature
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.attention.recurrent import (
    Piece,
    RecurrentForward,
    RecurrentStates,
    StateCache,
    StatePort,
)
from engine.models.load import LoadedModel, load_adapter
from tests.parity import architectures
from tests.parity.test_architectures import prompt, stock_tokens
from tests.parity.test_engine_tiers import BLOCK, NUM_OUT, House
from tests.support.models import save_adapter
from tiers.policy.checkpoints import worth_blocks


@pytest.fixture(params=sorted(architectures.RECURRENT))
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of kernels that are not installed
    return architectures.served(request.param)


def generated_tokens(model_type: str, tokens: list[int]) -> list[int]:
    """What transformers generates from its own cache of states."""
    model = architectures.stock(model_type)
    model.generation_config.eos_token_id = None
    given = torch.tensor([tokens])
    mask = torch.ones_like(given)
    generated = model.generate(
        given, attention_mask=mask, do_sample=False, max_new_tokens=NUM_OUT, pad_token_id=0
    )
    return generated[0, len(tokens) :].tolist()


def test_tokens_are_those_of_transformers_cold_and_from_every_tier(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    tokens = prompt(4 * BLOCK + 11, seed=1)
    model_type = loaded.name.removeprefix("tiny-")
    expected = stock_tokens(model_type, tokens)
    assert expected == generated_tokens(model_type, tokens)
    first = House(loaded, tmp_path, step_tokens=2 * BLOCK)
    try:
        served = [first.ask([tokens], cache=False), first.ask([tokens]), first.ask([tokens])]
        for to_disk in (False, True):
            first.sink(to_disk=to_disk)
            served.append(first.ask([tokens]))
        longer = tokens + expected + prompt(20, seed=4)
        [(turn, counts)] = first.ask([longer])
        assert stock_tokens(model_type, longer) == turn
        layout = first.cache.layout
        pays = worth_blocks(layout.checkpoint.nbytes, layout.nbytes) == 1
        assert (5 if pays else 4) * BLOCK == counts.hit_device  # the answer before it has one block
    finally:
        first.close()
    second = House(loaded, tmp_path, step_tokens=2 * BLOCK)
    try:
        served.append(second.ask([tokens]))
    finally:
        second.close()
    assert [expected] * 6 == [answer for [(answer, _)] in served]
    hits = [counts for [(_, counts)] in served]
    assert [0, 0] == [counts.hit for counts in hits[:2]]
    tiers = [hits[2].hit_device, hits[3].hit_host, hits[4].hit_disk, hits[5].hit_disk]
    assert [4 * BLOCK] * 4 == tiers
    assert architectures.row(loaded) in architectures.PAGE.read_text(encoding="utf-8").splitlines()


def test_prompts_that_part_anywhere_resume_where_they_parted(tmp_path: Path) -> None:
    """At the second sight the prompt's own part is computed; a third one resumes there."""
    loaded = architectures.served("qwen3_next")
    house = House(loaded, tmp_path, device_blocks=200, step_tokens=2 * BLOCK)
    trunk = prompt(6 * BLOCK, seed=1)
    try:
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
    finally:
        house.close()


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("qwen3_next", ["in_proj_qkvz", "out_proj", "q_proj"]),
        ("bamba", ["in_proj", "q_proj"]),
        ("minimax", ["qkv_proj", "out_proj", "q_proj"]),
    ],
)
def test_a_sequence_answers_with_its_own_adapter_beside_others(
    model_type: str,
    targets: list[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Each sequence's adapter updates the layers of the recurrent modules too."""
    loaded = architectures.served(model_type)
    for number in range(2):
        folder = tmp_path_factory.mktemp("adapter")
        save_adapter(
            folder,
            architectures.stock(model_type),
            seed=number,
            r=4,
            target_modules=targets,
        )
        load_adapter(loaded, f"a{number}", str(folder))
    names = ("a0", None, "a1", "a0")
    asked = [prompt(30, seed=1)] * 3 + [prompt(20, seed=2)]
    house = House(loaded, tmp_path, step_tokens=BLOCK)
    try:
        alone = [
            house.ask([tokens], cache=False, adapters=[name])[0][0]
            for tokens, name in zip(asked, names, strict=True)
        ]
        together = house.ask(asked, adapters=names)
    finally:
        house.close()
        for number in range(2):
            loaded.adapters.remove(f"a{number}")
    assert 3 == len({tuple(answer) for answer in alone[:3]})
    assert alone == [answer for answer, _ in together]


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_leaves_the_states_as_they_were(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, one sequence at a time, whether it failed before its end or after."""
    house = House(architectures.served("qwen3_next"), tmp_path, step_tokens=BLOCK)
    asked = [prompt(3 * BLOCK + 5, seed=1), prompt(BLOCK, seed=2)]
    try:
        expected = [house.ask([tokens], cache=False)[0][0] for tokens in asked]
        runner: Any = house.engine._runner
        owner, name = (runner._sampler, "sample") if late else (runner._recurrent, "finish")
        whole, calls = getattr(owner, name), count()

        def failing(*arguments: Any) -> Any:
            if next(calls) % 5 == 3:
                raise RuntimeError("a step fails")
            return whole(*arguments)

        monkeypatch.setattr(owner, name, failing)
        assert expected == [answer for answer, _ in house.ask(asked)]
        assert next(calls) > 8
    finally:
        house.close()


def test_samples_of_one_prompt_continue_its_states(loaded: LoadedModel, tmp_path: Path) -> None:
    house = House(loaded, tmp_path, step_tokens=2 * BLOCK)
    tokens = prompt(2 * BLOCK + 5, seed=1)
    try:
        [(expected, _)] = house.ask([tokens], cache=False)
        for cache in (False, True, True):
            [(answers, _)] = house.ask([tokens], n=5, cache=cache)
            assert expected * 5 == answers
    finally:
        house.close()


@pytest.mark.parametrize("name", ["cache_params", "past_key_values", "cache"])
def test_a_module_gets_the_states_under_the_name_that_it_has_for_them(name: str) -> None:
    """transformers 5.24 renamed both names, and ignores what it does not know."""
    given: list[Any] = []

    def forward(self: nn.Module, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
        given.append(named.get(name))
        return hidden_states

    known = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD, default=None)
             for each in ("self", "hidden_states", name)]  # fmt: skip
    ignored = Parameter("kwargs", Parameter.VAR_KEYWORD)
    forward.__signature__ = Signature([*known, ignored])  # type: ignore[attr-defined]
    port = StatePort()
    port.states = RecurrentStates()
    port.states.begin([Piece(sequence_id=0, start=0, num_tokens=3)])
    module = type("Module", (nn.Module,), {"forward": forward})()
    RecurrentForward(module, port)(torch.zeros(1, 3, 2))
    assert isinstance(given[0], StateCache)
