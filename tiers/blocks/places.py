"""The places of a pool: which are free, and which are cut into lesser ones.

A block whose windows have left needs less room. If a layout has windows, a place may be cut into
`num_lesser` places for such blocks, and is whole again once all of these are free. Slots on the
device and frames on the host are both places. Imports no torch. One thread owns a pool.
"""

from array import array


class BlockPlaces:
    """`num_whole` places, known by number. Whole ones are the multiples of `num_lesser`; the lesser
    places of a whole one have its number and those that follow. The one given back last is taken
    first, and one that was never taken comes last, in the order of their numbers.

    Invariant: every place is free here or has one owner.
    """

    def __init__(self, num_whole: int, num_lesser: int) -> None:
        self.num_whole = num_whole
        self.num_lesser = num_lesser  # 1 if no place is ever cut
        self.num_lesser_taken = 0
        self._free = array("i", range((num_whole - 1) * num_lesser, -1, -num_lesser))
        # Of places that are cut, by the whole place's number: the free lesser ones, if there are
        # any, and how many of the others have an owner.
        self._lesser_free: dict[int, list[int]] = {}
        self._lesser_used: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Whole places that have an owner, or are cut."""
        return self.num_whole - len(self._free)

    @property
    def num_cut(self) -> int:
        return len(self._lesser_used)

    @property
    def num_taken(self) -> int:
        """BlockPlaces of either size that have an owner."""
        return self.num_used - self.num_cut + self.num_lesser_taken

    @property
    def num_lesser_free(self) -> int:
        """Lesser places that can be taken without cutting a whole one."""
        return self.num_cut * self.num_lesser - self.num_lesser_taken

    def whole_of(self, place: int) -> int:
        """The whole place that this one is, or is part of: which one, from 0 on."""
        return place // self.num_lesser

    def is_lesser(self, place: int) -> bool:
        """Whether a place that has an owner is a lesser one."""
        return place // self.num_lesser in self._lesser_used

    def take(self, *, lesser: bool = False) -> int | None:
        """A free place, or None. With `lesser`, one for a block without its windows."""
        if lesser and self.num_lesser > 1:
            return self._take_lesser()
        return self._free.pop() if self._free else None

    def _take_lesser(self) -> int | None:
        if not self._lesser_free:
            if not self._free:
                return None
            self._cut(self._free.pop(), num_used=0)
        number, free = next(iter(self._lesser_free.items()))
        place = free.pop()
        self._lesser_used[number] += 1
        self.num_lesser_taken += 1
        if not free:
            del self._lesser_free[number]
        return place

    def lessen(self, place: int) -> None:
        """Make a whole place a lesser one of the same number and owner. The others are free."""
        assert self.num_lesser > 1 and not self.is_lesser(place), f"{place} is no whole place"
        self._cut(place, num_used=1)

    def _cut(self, place: int, *, num_used: int) -> None:
        """Cut a whole place. The first `num_used` of its lesser ones have owners."""
        number = place // self.num_lesser
        last, first = place + self.num_lesser - 1, place + num_used
        self._lesser_free[number] = list(range(last, first - 1, -1))
        self._lesser_used[number] = num_used
        self.num_lesser_taken += num_used

    def give(self, place: int) -> None:
        """Give a place back. Its owner must not use it again."""
        if self._lesser_used and (number := place // self.num_lesser) in self._lesser_used:
            self._lesser_free.setdefault(number, []).append(place)
            self._lesser_used[number] -= 1
            self.num_lesser_taken -= 1
            if self._lesser_used[number]:
                return
            assert len(self._lesser_free[number]) == self.num_lesser, f"{place} was given twice"
            del self._lesser_free[number], self._lesser_used[number]
            place = number * self.num_lesser
        assert len(self._free) < self.num_whole, f"place {place} was given back twice"
        self._free.append(place)

    def reuse(self, place: int, *, lesser: bool = False) -> int | None:
        """A place for a new owner instead of this one. None: others must be given back too."""
        if self.num_lesser == 1 or self.is_lesser(place) == lesser:
            return place
        self.give(place)
        return self.take(lesser=lesser)

    def take_last(self, place: int) -> None:
        """Take lesser places of the whole one with this part after those of all others."""
        number = place // self.num_lesser
        self._lesser_free[number] = self._lesser_free.pop(number)
