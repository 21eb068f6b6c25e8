"""Quotas: borrowing while there is room, giving back when another needs it, over all tiers. Pins
with an expiry and a bound."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plain_lru import Lru
from tiers.errors import ConfigurationError
from tiers.policy.policy import Use
from tiers.policy.quota import COMMON, FairPolicy, Quotas, QuotaShares
from tiers.policy.retention import Pin, PinError, Pins


def shared(capacity: int, quotas: dict[str, int], default: int = 0) -> Quotas:
    """One tier that is the whole cache."""
    return Quotas(QuotaShares(capacity, quotas, default), capacity)


class Cache:
    """One tier of `capacity` bytes under quotas; every block is one byte."""

    def __init__(self, quotas: Quotas, capacity: int) -> None:
        self.policy = FairPolicy[tuple[str, int]](quotas, Lru, 1)
        self.capacity = capacity
        self.blocks: set[tuple[str, int]] = set()

    def use(self, tenant: str, number: int) -> list[tuple[str, int]]:
        """Returns what was evicted for it."""
        key, use = (tenant, number), Use(0.0, tenant)
        if key in self.blocks:
            self.policy.touch(key, use)
            return []
        self.policy.insert(key, use)
        self.blocks.add(key)
        evicted = []
        while len(self.blocks) > self.capacity:
            victim = self.policy.victim()
            assert victim is not None
            self.blocks.remove(victim)
            evicted.append(victim)
        return evicted

    def count(self, tenant: str) -> int:
        return sum(owner == tenant for owner, _ in self.blocks)


def test_a_quota_is_the_same_part_of_every_tier():
    """A tenant promised half of all bytes has half of the device, whatever it has on the host."""
    shares = QuotaShares(120, {"a": 60})
    host, device = Cache(Quotas(shares, 100), 100), Cache(Quotas(shares, 20), 20)
    for number in range(100):
        host.use("a", number)
    for number in range(10):
        device.use("a", number)
    for number in range(100):
        device.use("scan", number)
    assert (device.count("a"), device.count("scan")) == (10, 10)
    assert device.policy._quotas.usage() == {"a": (10, 10), COMMON: (10, 10)}


def test_the_default_is_promised_as_often_as_it_fits():
    """Ten tenths are all there is, whatever floats make of them."""
    shares = QuotaShares(10, {}, default_bytes=1)
    assert list(range(10)) == [shares.group(owner) for owner in range(10)]
    assert COMMON is shares.group("late")
    assert 1.0 == pytest.approx(sum(map(shares.share, shares.groups())))


def test_a_victim_costs_one_look_while_its_group_is_over_its_share(monkeypatch):
    quotas = shared(100, {"a": 10, "b": 10, "c": 10})
    cache = Cache(quotas, 300)
    for number in range(300):
        cache.use("abc"[number % 3], number)
    compared: list[object] = []
    pressure = quotas.pressure
    monkeypatch.setattr(quotas, "pressure", lambda group: compared.append(group) or pressure(group))
    for _ in range(60):
        cache.policy.victim()
    assert 3 == len(compared)


def test_an_owner_without_a_quota_gets_the_default_while_there_is_room_to_promise():
    cache = Cache(shared(100, {"a": 40}, default=25), 100)
    for tenant in ("b", "c", "d"):
        for number in range(30):
            cache.use(tenant, number)
    usage = cache.policy._quotas.usage()
    shares = {group: share for group, (_, share) in usage.items()}
    assert shares == {"a": 40, "b": 25, "c": 25, COMMON: 10}
    for number in range(40):
        cache.use("a", number)
    assert [cache.count(tenant) for tenant in "abcd"] == [40, 25, 25, 10]


def test_tenants_are_told_apart_by_their_owner():
    """Several scopes of one tenant share its quota."""
    owners = {"s1": "acme", "s2": "acme"}
    shares = QuotaShares(100, {"acme": 30}, owner_of=owners.get)
    cache = Cache(Quotas(shares, 100), 100)
    for number in range(20):
        cache.use("s1", number)
        cache.use("s2", number)
    assert cache.policy._quotas.usage() == {"acme": (40, 30), COMMON: (0, 70)}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_nobody_at_or_under_its_share_loses_while_another_is_over(seed):
    rng = random.Random(seed)
    quotas = shared(40, {"a": 10, "b": 5})
    cache = Cache(quotas, 40)
    for _ in range(300):
        tenant = rng.choice("abcd")
        over = None
        for owner, _ in cache.use(tenant, rng.randrange(60)):
            used, share = quotas.usage()[quotas.group(owner)]
            over = used + 1 > share
            assert over or all(u <= s for u, s in quotas.usage().values())
    assert sum(used for used, _ in quotas.usage().values()) == len(cache.blocks)


def test_a_held_block_is_passed_over_for_the_next_group():
    cache = Cache(shared(4, {"a": 1}), 4)
    cache.use("a", 1)
    cache.use("a", 2)
    cache.use("b", 1)
    for number in (1, 2):
        cache.policy.hold(("a", number))
    assert cache.policy.coldest(5) == [("b", 1)]
    assert cache.policy.victim() == ("b", 1)
    assert cache.policy.victim() is None
    cache.policy.release(("a", 2), Use(1.0, "a"))
    assert cache.policy.victim() == ("a", 2)
    cache.policy.remove(("a", 1))
    cache.policy.remove(("a", 1))


def test_quotas_that_cannot_be_kept_are_refused():
    with pytest.raises(ConfigurationError, match="promise 120 bytes"):
        QuotaShares(100, {"a": 70, "b": 50})
    with pytest.raises(ConfigurationError, match="'a' is -1 bytes"):
        QuotaShares(100, {"a": -1})


def put(pins, name, keys, until_s):
    return pins.put(Pin(name=name, keys=tuple(keys), until_s=until_s))


def put_owned(pins, owner, keys, most=None, name=""):
    name = f"{owner}:{name}"
    return pins.put(Pin(name=name, keys=tuple(keys), until_s=9.0, owner=owner), most)


def kept(pins, owner):
    """Blocks under an owner's pins, each once."""
    return len({key for pin in pins.of_owner(owner) for key in pin.keys})


def test_a_tenant_keeps_at_most_what_it_leaves_free():
    """The next share finds room: half of all, then half of the rest."""
    pins = Pins[int](max_blocks=16)
    put_owned(pins, "a", range(8))
    with pytest.raises(PinError, match="'a' keeps 8 blocks, with these 9, and may keep 8 now"):
        put_owned(pins, "a", [100], name="more")
    put_owned(pins, "b", range(20, 24))
    with pytest.raises(PinError, match="may keep 4 now"):
        put_owned(pins, "b", [200], name="more")
    put_owned(pins, "c", range(40, 42))
    assert (kept(pins, "a"), kept(pins, "b"), kept(pins, "c")) == (8, 4, 2)
    pins.put(Pin(name="house", keys=(60, 61), until_s=9.0))  # an operator's: to the last block
    assert pins.num_blocks == 16


def test_a_block_under_two_pins_of_a_tenant_counts_once():
    pins = Pins[int](max_blocks=8)
    put_owned(pins, "a", range(4))
    put_owned(pins, "a", range(4), name="again")
    assert kept(pins, "a") == 4
    pins.unpin("a:")
    assert kept(pins, "a") == 4
    pins.unpin("a:again")
    assert (kept(pins, "a"), pins.num_blocks) == (0, 0)


def test_a_promised_part_bounds_a_tenant_instead():
    pins = Pins[int](max_blocks=16)
    put_owned(pins, "a", range(12), most=12)
    with pytest.raises(PinError, match="may keep 2 now"):
        put_owned(pins, "b", range(20, 23), most=2)


def test_a_name_of_another_owner_is_not_replaced():
    pins = Pins[int](max_blocks=16)
    pins.put(Pin(name="house", keys=(1,), until_s=9.0))
    with pytest.raises(PinError, match="is taken"):
        pins.put(Pin(name="house", keys=(2,), until_s=9.0, owner="a"))
    assert [pin.keys for pin in pins.pins()] == [(1,)]


NAMED = st.tuples(st.sampled_from("pqr"), st.lists(st.sampled_from("abcdef"), max_size=4))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), NAMED), max_size=20))
def test_held_and_released_keys_balance(operations):
    """A tier that follows its calls holds just the pinned blocks."""
    pins, held = Pins[str](max_blocks=3), set()
    for is_pin, (name, keys) in operations:
        if is_pin:
            try:
                release = put(pins, name, keys, 1.0)
                held |= set(keys)
            except PinError:
                release = []  # and nothing has changed
        else:
            release = pins.unpin(name)
        assert set(release) <= held
        held -= set(release)
        assert held == {key for pin in pins.pins() for key in pin.keys}
        assert len(held) == pins.num_blocks <= 3
