"""What is copied down, and what stays below."""

import pytest

from tiers.policy.admission import (
    KEEP_SHARE,
    Demotion,
    GhostList,
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
    demotion = Demotion[str](WritePolicy.ON_SECOND_HIT, num_ghosts=2)
    assert [demotion.on_use(key) for key in "abca"] == [False, False, False, False]
    assert demotion.on_use("c")


def test_ghosts_are_forgotten_oldest_first():
    ghosts = GhostList[str](2)
    assert [ghosts.see(key) for key in "abac"] == [False, False, True, False]
    assert [key in ghosts for key in "abc"] == [True, False, True]
    assert len(ghosts) == 2


def test_a_tier_keeps_copies_where_they_are_a_small_share_of_all_room():
    assert keeps_copies(100 * KEEP_SHARE, 100)
    assert not keeps_copies(100 * KEEP_SHARE + 1, 100)
