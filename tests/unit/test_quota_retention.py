"""Pins with an expiry and a bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.policy.retention import Pin, PinError, Pins


def put(pins, name, keys, until_s):
    return pins.put(Pin(name=name, keys=tuple(keys), until_s=until_s))


def test_a_pin_holds_until_it_expires():
    pins = Pins[str](max_blocks=4)
    assert put(pins, "p", ["a", "b"], until_s=10.0) == []
    assert pins.expire(9.9) is None
    assert sorted(pins.expire(10.0)) == ["a", "b"]
    assert (pins.num_blocks, pins.pins()) == (0, [])


def test_a_block_under_two_pins_is_held_once_and_released_with_the_last():
    pins = Pins[str](max_blocks=4)
    put(pins, "p", ["a", "b"], 10.0)
    assert put(pins, "q", ["a", "c"], 20.0) == []
    assert pins.unpin("p") == ["b"]
    assert "a" in pins
    assert sorted(pins.unpin("q")) == ["a", "c"]
    assert pins.unpin("q") == []


def test_a_pin_beyond_the_bound_is_refused_and_changes_nothing():
    pins = Pins[str](max_blocks=3)
    put(pins, "p", ["a", "b"], 10.0)
    with pytest.raises(PinError, match="'q' would make 4 pinned blocks, and 3 may be"):
        put(pins, "q", ["c", "d"], 10.0)
    assert [pin.name for pin in pins.pins()] == ["p"]
    assert put(pins, "p", ["b", "c", "d"], 10.0) == ["a"]


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
    pins, held = Pins[str](max_blocks=5), set()
    for is_pin, (name, keys) in operations:
        if is_pin:
            try:
                release = put(pins, name, keys, 1.0)
            except PinError:
                continue
            held |= set(keys)
        else:
            release = pins.unpin(name)
        assert set(release) <= held
        held -= set(release)
        assert held == {key for pin in pins.pins() for key in pin.keys}
        assert len(held) == pins.num_blocks <= 5
