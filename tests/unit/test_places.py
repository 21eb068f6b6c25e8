"""BlockPlaces of a pool, whole and lesser: what is counted is what is taken."""

import random

import pytest

from tiers.blocks.places import BlockPlaces


@pytest.mark.parametrize("num_lesser", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_no_part_of_a_place_has_two_owners_and_none_is_lost(seed, num_lesser):
    chance = random.Random(seed)
    places = BlockPlaces(5, num_lesser)
    held: dict[int, bool] = {}  # whether it is a lesser one
    for _ in range(800):
        lesser = chance.random() < 0.6
        act = chance.random()
        if act < 0.5:
            place = places.take(lesser=lesser)
            if place is not None:
                held[place] = lesser and num_lesser > 1
        elif held:
            place = chance.choice(list(held))
            was_lesser = held.pop(place)
            if act < 0.6 and not was_lesser and num_lesser > 1:
                places.lessen(place)
                held[place] = True
            elif act < 0.75:
                other = places.reuse(place, lesser=lesser)
                assert other is not None or not lesser, "half a place always has room for a part"
                if other is not None:
                    held[other] = lesser and num_lesser > 1
            else:
                places.give(place)
        lesser_held = [place for place, is_lesser in held.items() if is_lesser]
        cut = {places.whole_of(place) for place in lesser_held}
        num_whole = len(held) - len(lesser_held)
        parts = [
            part for place, is_lesser in held.items() for part in parts_of(places, place, is_lesser)
        ]
        assert len(parts) == len(set(parts))
        assert (len(held), len(cut)) == (places.num_taken, places.num_cut)
        assert 5 == num_whole + len(cut) + places.num_free
        assert len(cut) * num_lesser == len(lesser_held) + places.num_lesser_free
        assert all(is_lesser == places.is_lesser(place) for place, is_lesser in held.items())


def parts_of(places: BlockPlaces, place: int, is_lesser: bool) -> range:
    assert is_lesser or place % places.num_lesser == 0
    return range(place, place + (1 if is_lesser else places.num_lesser))


def test_parts_of_a_place_that_is_to_be_emptied_are_taken_last():
    places = BlockPlaces(2, 4)
    first = [places.take(lesser=True) for _ in range(3)]
    second = places.take()
    places.lessen(second)
    places.take_last(first[0])
    taken = [places.take(lesser=True) for _ in range(4)]
    assert [1, 1, 1, 0] == [places.whole_of(place) for place in taken if place is not None]


def test_a_place_given_back_twice_is_noticed():
    places = BlockPlaces(1, 1)
    place = places.take()
    places.give(place)
    with pytest.raises(AssertionError, match="back twice"):
        places.give(place)
