"""Layers that keep a state where a block ends: LFM2's short convolutions.

That LFM2 answers as transformers does from every tier is in `test_architectures`.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.base import ReferenceAttention
from engine.attention.states import StatefulAttention, windows_of
from engine.batch import Span
from engine.models.load import LoadedModel
from engine.request import SamplingParams
from tests.parity import architectures
from tests.parity.test_architectures import prompt
from tests.parity.test_engine_tiers import BLOCK, NUM_OUT, House
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.memory.device import DevicePool

WIDTH = 3
LAYERS = (
    LayerLayout(1, 8, 8, shared=True, window=WIDTH, rows=WIDTH),
    LayerLayout(2, 4, 4),
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return architectures.served("lfm2")


@pytest.fixture
def house(loaded: LoadedModel, tmp_path: Path) -> Iterator[House]:
    house = House(loaded, tmp_path, step_tokens=BLOCK)
    yield house
    house.close()


def test_of_a_long_prefix_the_last_states_alone_are_needed(loaded: LoadedModel) -> None:
    layout = loaded.layout(BLOCK)
    states = 3 * WIDTH * 64 * 4  # three layers, three rows of 64 numbers, whatever the block size
    assert (1, True) == (layout.reach, layout.has_states)
    assert layout.nbytes - states == layout.lasting_nbytes == BLOCK * 2 * 2 * 16 * 4


def test_samples_of_one_prompt_part_within_a_block_and_keep_their_states(house: House) -> None:
    """More samples than tokens of a step: the first have gone on when the last begin."""
    tokens = prompt(2 * BLOCK + 5, seed=1)
    [(expected, _)] = house.ask([tokens], cache=False)
    for _ in range(2):
        [(answers, _)] = house.ask([tokens], n=BLOCK + 6)
        assert expected * (BLOCK + 6) == answers


def test_prompts_that_end_anywhere_in_a_block_answer_as_cold(house: House) -> None:
    """A prefix is taken up where a block ends: never within one, and also right at the end."""
    tokens = prompt(4 * BLOCK, seed=2)
    house.ask([tokens])
    for length in range(2 * BLOCK - 1, 3 * BLOCK + 2, 2):
        [(expected, _)] = house.ask([tokens[:length]], cache=False)
        [(answer, counts)] = house.ask([tokens[:length]])
        assert expected == answer
        assert min(length // BLOCK * BLOCK, length - 1) == counts.hit
    assert len(expected) == NUM_OUT


def span(start: int, count: int, *, write_kv: bool = True) -> Span:
    tokens = np.zeros(count, np.int32)
    params = SamplingParams(temperature=0)
    return Span(1, tokens, start, [2, 0, 1], False, params, write_kv=write_kv)


def test_a_state_is_what_the_last_finished_step_left() -> None:
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


def test_rows_of_a_block_are_copied_with_its_state() -> None:
    pool = DevicePool(BlockLayout(LAYERS, 4, "float32"), 2)
    pool.tensor.copy_(torch.rand(pool.tensor.shape))
    pool.copy_rows(0, 1, 4)
    assert torch.equal(pool.tensor[0], pool.tensor[1])
