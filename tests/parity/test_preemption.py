"""Sequences that are preempted beside others answer as alone, whatever their layers keep."""

from contextlib import closing

import pytest

from tests.parity import architectures
from tests.parity.test_architectures import prompt
from tests.support.house import BLOCK, House


@pytest.mark.parametrize(
    "kind", [*sorted(architectures.RECURRENT), "deepseek_v3", "gemma2", "lfm3", "qwen3"]
)
def test_prompts_beside_others_answer_as_alone_though_some_are_preempted(kind, tmp_path):
    """Twelve blocks for four requests of one to six."""
    loaded = architectures.served(kind)
    tokens = prompt(4 * BLOCK + 11, seed=1)
    asked = [tokens, tokens[:40], tokens[:50] + prompt(30, seed=2), prompt(1, seed=3)]
    with closing(House(loaded, tmp_path, device_blocks=12, step_tokens=2 * BLOCK)) as house:
        alone = [house.ask([each], cache=False)[0][0] for each in asked]
        for _ in range(3):
            assert alone == [answer for answer, _ in house.ask(asked)]
