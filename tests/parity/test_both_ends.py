"""A prefix computed and loaded from both ends, over the real disk, answers as a cold one."""

from pathlib import Path

import pytest

from tests.parity.test_engine_tiers import BLOCK, House
from tests.sim.test_both_ends import Front
from tests.support.models import tiny_model

NUM_BLOCKS = 20


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_both_ends_answer_as_a_cold_prompt(architecture: str, tmp_path: Path) -> None:
    loaded = tiny_model(architecture)
    prompt = [(7 * i * i + 3) % loaded.vocab_size for i in range(NUM_BLOCKS * BLOCK + 3)]
    house = House(loaded, tmp_path, both_ends=True)
    [(expected, _)] = house.ask([prompt])
    economy = house.cache._promoter._economy = Front()
    for front in (1, 7, NUM_BLOCKS - 1):
        house.sink(to_disk=True)
        economy.num_blocks = front
        [(tokens, counts)] = house.ask([prompt])
        assert expected == tokens
        assert (NUM_BLOCKS - front) * BLOCK == counts.hit_disk == counts.hit
    house.close()
