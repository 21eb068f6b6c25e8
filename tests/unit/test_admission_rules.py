"""What is copied down, what stays below, and where checkpoints of recurrent states are taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.policy.admission import KEEP_SHARE, Demotion, WritePolicy, keeps_copies
from tiers.policy.checkpoints import STRIDE, keeps_stop, positions, prompt_end, worth_blocks


@pytest.mark.parametrize(
    ("write_policy", "uses", "evict"),
    [
        (WritePolicy.ON_EVICT, [False, False], True),
        (WritePolicy.WRITE_THROUGH, [True, True], True),
        (WritePolicy.ON_SECOND_HIT, [False, True], False),
    ],
)
def test_when_a_block_is_copied_down(write_policy, uses, evict):
    demotion = Demotion[str](write_policy, num_ghosts=8)
    assert [demotion.on_use("a") for _ in range(2)] == uses
    assert demotion.on_evict("a") is evict


def test_a_second_use_counts_only_while_the_ghost_is_remembered():
    """The ghost seen longest ago is forgotten first."""
    demotion = Demotion[str](WritePolicy.ON_SECOND_HIT, num_ghosts=2)
    used = [demotion.on_use(key) for key in "abaca"]
    assert used == [False, False, True, False, True]
    assert [demotion.on_use(key) for key in "bc"] == [False, False]


def test_a_tier_keeps_copies_where_they_are_a_small_share_of_all_room():
    assert keeps_copies(100 * KEEP_SHARE, 100)
    assert not keeps_copies(100 * KEEP_SHARE + 1, 100)


counts = st.integers(0, 200)


@given(
    start=counts,
    tokens=st.integers(1, 5000),
    size=st.integers(1, 64),
    parts=counts,
    worth=st.integers(1, 60),
)
def test_a_prompt_resumes_at_each_of_its_checkpoints_and_they_are_few(
    start, tokens, size, parts, worth
):
    wanted = positions(start, tokens, size, worth=worth, parts=parts)
    end = prompt_end(tokens, size)
    assert all(start < number <= end and number * size < tokens for number in wanted)
    assert (end in wanted) == (end > start)
    assert (min(parts, end) in wanted) == (min(parts, end) > start)
    assert (len(wanted) - 2) * worth * STRIDE <= end


def test_an_answer_is_kept_where_its_blocks_are_as_large_as_the_state():
    worth = worth_blocks(77_000_000, 1_572_864)  # Qwen3-Next-80B, blocks of 64 tokens
    assert 49 == worth
    ends = [keeps_stop(number, 6400, 64, worth=worth) for number in (98, 99, 147, 148)]
    assert [True, False, False, True] == ends  # 98: the prompt was not computed whole
    assert 1 == worth_blocks(1, 1_572_864)
