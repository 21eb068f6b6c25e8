"""In which order each policy evicts, on sequences short enough to follow by hand."""

from tiers.policy.arc import Arc
from tiers.policy.lru import Lru
from tiers.policy.policy import Policy, Use
from tiers.replay.belady import Belady, future_uses

USE = Use(0.0, 1)


def filled(policy: Policy[str], keys: str) -> Policy[str]:
    for key in keys:
        policy.insert(key, USE)
    return policy


def victims(policy: Policy[str], count: int) -> str:
    return "".join(policy.victim() or "-" for _ in range(count))


def test_lru_evicts_what_was_used_longest_ago():
    policy = filled(Lru(), "abc")
    policy.touch("a", USE)
    policy.hold("b")
    policy.release("b", USE)
    assert policy.coldest(2) == ["c", "a"]
    assert victims(policy, 4) == "cab-"


def test_lru_given_a_chain_tail_first_evicts_the_tail_first():
    policy = Lru[str]()
    for chain in ("abc", "abd"):
        for key in reversed(chain):
            if key in policy.coldest(9):
                policy.touch(key, USE)
            else:
                policy.insert(key, USE)
    assert victims(policy, 4) == "cdba"


def test_arc_prefers_blocks_used_again_and_learns_from_ghosts():
    policy = filled(Arc(4), "abcd")
    policy.touch("a", USE)
    assert victims(policy, 1) == "b"
    filled(policy, "b")  # a ghost of the recent list: that list should have been longer
    assert victims(policy, 4) == "cabd"


def test_min_evicts_what_is_needed_last():
    chains = ["ab", "c", "b", "a"]
    policy = Belady[str](future_uses(chains))
    first, second = Use(0.0, 2), Use(1.0, 1)
    policy.insert("b", first, "a", 1)
    policy.insert("a", first, None, 0)
    policy.insert("c", second)
    assert victims(policy, 4) == "cab-"
