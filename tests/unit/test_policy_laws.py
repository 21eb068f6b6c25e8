"""What the order of eviction keeps, driven with random operations."""

import random
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.policy.lru import Lru
from tiers.policy.policy import Use

USE = Use(0.0, 1)


class Driver:
    """A cache of `capacity` blocks that serves chains and mirrors what its policy should know."""

    def __init__(self, capacity: int) -> None:
        self.policy: Lru[Any] = Lru()
        self.capacity = capacity
        self.resident: set[Any] = set()
        self.held: set[Any] = set()
        self.now_s = 0.0

    def serve(self, chain: list[Any]) -> None:
        self.now_s += 1.0
        use = Use(self.now_s, len(chain))
        for key in reversed(chain):
            if key in self.held:
                continue
            if key in self.resident:
                self.policy.touch(key, use)
            else:
                self.resident.add(key)
                self.policy.insert(key, use)
        self.shrink()

    def shrink(self) -> None:
        while len(self.resident) > self.capacity:
            victim = self.policy.victim()
            if victim is None:
                assert self.resident <= self.held, "blocks that are not held were not offered"
                return
            assert victim in self.resident, f"{victim} left before"
            assert victim not in self.held, f"{victim} is held"
            self.resident.remove(victim)

    def drain(self) -> Iterator[Any]:
        while (victim := self.policy.victim()) is not None:
            yield victim


CHAINS = [
    [tree * 100 + depth for depth in range(length)] for tree in range(6) for length in (1, 3, 6)
]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["serve", "hold", "release", "remove", "coldest"]), st.integers(0, 17)
    ),
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS)
def test_a_policy_knows_just_the_resident_blocks_and_offers_no_held_one(operations):
    """After any operations all blocks that are not held come out once, and then none."""
    driver = Driver(capacity=12)
    for operation, number in operations:
        chain = CHAINS[number]
        known = [key for key in chain if key in driver.resident]
        if operation == "serve":
            driver.serve(chain)
        elif operation == "hold":
            for key in set(known) - driver.held:
                driver.policy.hold(key)
                driver.held.add(key)
        elif operation == "release":
            use = Use(driver.now_s, len(chain))
            deepest = CHAINS[number // 3 * 3 + 2]  # who holds a child holds its parent
            for key in reversed(deepest):
                if key in driver.held:
                    driver.held.remove(key)
                    driver.policy.release(key, use)
        elif operation == "remove":
            for key in known:
                driver.policy.remove(key)
            driver.resident -= set(known)
            driver.held -= set(known)
        else:
            coldest = driver.policy.coldest(number)
            assert coldest == driver.policy.coldest(number), "to look changes the order"
            assert len(coldest) == len(set(coldest)) <= number
            assert set(coldest) <= driver.resident - driver.held
    left = list(driver.drain())
    assert sorted(left) == sorted(driver.resident - driver.held)
    assert driver.policy.victim() is None


def test_what_was_held_is_offered_again_after_release():
    """Parked blocks come back."""
    driver = Driver(capacity=8)
    driver.serve([1, 2, 3, 4])
    for key in (1, 2, 3, 4):
        driver.policy.hold(key)
    assert driver.policy.victim() is None
    for key in (4, 3, 2, 1):
        driver.policy.release(key, Use(9.0, 4))
    assert sorted(driver.drain()) == [1, 2, 3, 4]


def test_removing_a_block_twice_or_one_never_seen_is_ignored():
    """A tier may tell twice."""
    driver = Driver(capacity=8)
    driver.serve([1, 2])
    for key in (1, 1, 99):
        driver.policy.remove(key)
    assert list(driver.drain()) == [2]


def test_a_leaf_leaves_before_its_parent():
    """Chains that branch: no victim has a resident child."""
    rng = random.Random(7)
    driver = Driver(capacity=64)
    for _ in range(300):
        path = [rng.randrange(8), *(rng.choice((0, 0, 0, 1)) for _ in range(rng.randrange(9)))]
        driver.serve([tuple(path[: depth + 1]) for depth in range(len(path))])
    while (victim := driver.policy.victim()) is not None:
        driver.resident.remove(victim)
        assert not any(key[:-1] == victim for key in driver.resident)
    assert not driver.resident


def test_lru_evicts_what_was_used_longest_ago():
    order = Lru[str]()
    for key in "abc":
        order.insert(key, USE)
    order.touch("a", USE)
    order.hold("b")
    order.release("b", USE)
    assert order.coldest(2) == ["c", "a"]
    assert [order.victim() for _ in range(4)] == ["c", "a", "b", None]
