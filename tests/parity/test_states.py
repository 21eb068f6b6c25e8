"""Layers that keep a state: LFM2's short convolutions, and recurrent ones.

That they answer as transformers does from every tier is in `test_architectures`.
"""

from contextlib import closing
from itertools import count

import numpy as np
import pytest
import torch

from engine.attention.base import ReferenceAttention
from engine.attention.states import StatefulAttention, windows_of
from engine.batch import Span
from engine.models.load import load_adapter
from engine.request import SamplingParams
from tests.parity import architectures
from tests.parity.test_architectures import prompt
from tests.support.house import BLOCK, NUM_OUT, House
from tests.support.models import save_adapter
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.memory.device import DevicePool

WIDTH = 3
LAYERS = (LayerLayout(1, 8, 8, shared=True, window=WIDTH, rows=WIDTH), LayerLayout(2, 4, 4))


@pytest.fixture(params=["lfm2", "lfm3"])
def house(request, tmp_path):
    house = House(architectures.served(request.param), tmp_path, step_tokens=BLOCK)
    yield house
    house.close()


def test_of_a_long_prefix_the_last_states_alone_are_needed():
    layout = architectures.served("lfm2").layout(BLOCK)
    states = 3 * WIDTH * 64 * 4  # three layers, three rows of 64 numbers, whatever the block size
    assert (1, True) == (layout.reach, layout.has_states)
    assert layout.nbytes - states == layout.lasting_nbytes == BLOCK * 2 * 2 * 16 * 4


def test_samples_of_one_prompt_part_within_a_block_and_keep_their_states(house):
    """More samples than tokens of a step: the first have gone on when the last begin."""
    tokens = prompt(2 * BLOCK + 5, seed=1)
    [(expected, _)] = house.ask([tokens], cache=False)
    for _ in range(2):
        [(answers, _)] = house.ask([tokens], n=BLOCK + 6)
        assert expected * (BLOCK + 6) == answers


def test_prompts_that_end_anywhere_in_a_block_answer_as_cold(house):
    """A prefix is taken up where a block ends: never within one, and also right at the end."""
    tokens = prompt(4 * BLOCK, seed=2)
    house.ask([tokens])
    for length in range(BLOCK - 1, 3 * BLOCK + 2):
        [(expected, _)] = house.ask([tokens[:length]], cache=False)
        [(answer, counts)] = house.ask([tokens[:length]])
        assert expected == answer
        assert min(length // BLOCK * BLOCK, length - 1) == counts.hit
    assert len(expected) == NUM_OUT


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
def test_a_step_that_fails_leaves_the_states_as_they_were(model_type, late, tmp_path, monkeypatch):
    """Recurrent ones, and the rows of convolutions. It is tried again, one sequence at a time,
    whether it failed before its end or after."""
    asked = [prompt(3 * BLOCK + 5, seed=1), prompt(BLOCK, seed=2)]
    with closing(House(architectures.served(model_type), tmp_path, step_tokens=BLOCK)) as house:
        expected = [house.ask([tokens], cache=False)[0][0] for tokens in asked]
        runner = house.engine._runner
        states = runner._recurrent or runner._attention
        owner, name = (runner._sampler, "sample") if late else (states, "finish")
        whole, calls = getattr(owner, name), count()

        def failing(*arguments):
            if next(calls) % 5 == 3:
                raise RuntimeError("a step fails")
            return whole(*arguments)

        monkeypatch.setattr(owner, name, failing)
        assert expected == [answer for answer, _ in house.ask(asked)]
        assert next(calls) > 8


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("qwen3_next", ["in_proj_qkvz", "out_proj", "q_proj"]),
        ("bamba", ["in_proj", "q_proj"]),
        ("minimax", ["qkv_proj", "out_proj", "q_proj"]),
        ("lfm2", ["in_proj", "q_proj", "w1"]),
    ],
)
def test_a_sequence_answers_with_its_own_adapter_beside_others(model_type, targets, tmp_path):
    """Its adapter updates the layers of recurrent modules and of convolutions too."""
    loaded = architectures.served(model_type)
    for number in range(2):
        folder, stock = tmp_path / f"a{number}", architectures.stock(model_type)
        save_adapter(folder, stock, seed=number, r=4, target_modules=targets)
        load_adapter(loaded, f"a{number}", str(folder))
    names = ("a0", None, "a1", "a0")
    asked = [prompt(50, seed=1)] * 3 + [prompt(20, seed=2)]
    house = House(loaded, tmp_path / "house", step_tokens=BLOCK)
    try:
        alone = [
            house.ask([tokens], cache=False, adapters=[name])[0][0]
            for tokens, name in zip(asked, names, strict=True)
        ]
        for _ in range(2):
            assert alone == [answer for answer, _ in house.ask(asked, adapters=names)]
    finally:
        house.close()
        for number in range(2):
            loaded.adapters.remove(f"a{number}")
    assert 3 == len({tuple(answer) for answer in alone[:3]})


def span(start, count, *, write_kv=True):
    tokens = np.zeros(count, np.int32)
    params = SamplingParams(temperature=0)
    return Span(1, tokens, start, [2, 0, 1], False, params, write_kv=write_kv)


def test_a_state_is_what_the_last_finished_step_left():
    """Any cut into steps recalls what one step does; a step that failed leaves nothing."""
    layout = BlockLayout(LAYERS, 4, "float32")
    rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    expected = windows_of(torch.zeros(WIDTH - 1, 8), rows)
    for cuts in ([12], [4, 8, 12], [3, 5, 6, 7, 11, 12], list(range(1, 13))):
        pool = DevicePool(layout, 3)
        pool.tensor.fill_(torch.nan)
        states = StatefulAttention(ReferenceAttention(pool.tensor, LAYERS), pool.tensor, LAYERS)
        for start, end in zip([0, *cuts], cuts, strict=False):
            for fails in (True, False):
                states.begin([span(start, end - start)])
                given = rows[start:end] + (torch.nan if fails else 0)
                recalled = states.recall(0, given, WIDTH)
                if not fails:
                    assert torch.equal(expected[start:end], recalled)
                    states.finish()
        # The last token of a full block again, as for a prompt that is wholly cached.
        states.begin([span(11, 1, write_kv=False)])
        assert torch.equal(expected[11:], states.recall(0, rows[11:], WIDTH))
        states.finish()


def test_rows_of_a_block_are_copied_with_its_state():
    pool = DevicePool(BlockLayout(LAYERS, 4, "float32"), 2)
    pool.tensor.copy_(torch.rand(pool.tensor.shape))
    pool.copy_rows(0, 1, 4)
    assert torch.equal(pool.tensor[0], pool.tensor[1])
