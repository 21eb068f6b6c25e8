"""What is copied down, and what stays below."""

import pytest

from tiers.policy.admission import (
    KEEP_SHARE,
    Demotion,
    WritePolicy,
    keeps_copies,
)


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
