"""BlockPlaces of a pool, whole and lesser. Their counts are tested in `test_slots_cut`."""

import pytest

from tiers.blocks.places import BlockPlaces


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
