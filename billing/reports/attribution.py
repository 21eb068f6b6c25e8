"""Who asked: the user, session or tag of a charge, and which of them a report lists. Pure.

Callers name users and tags, so there can be a new one in every request. A report lists the dearest
and sums the rest: the memory for it does not depend on how many there are, and no sum is estimated.
"""

from billing.errors import InvalidName
from billing.gate.entries import Entry
from billing.names import check_text

LISTED = 100  # parts of a tenant in a report
TRACKED = 1_000  # while it looks for the dearest
OTHERS = "(others)"
NOBODY = "-"
OF_ROLLUPS = {"model": "model", "project": "project", "key": "key_id"}  # and the column
OF_REQUESTS = ("session", "user")
TAG = "tag:"
SPLITS = (*OF_ROLLUPS, *OF_REQUESTS, f"{TAG}NAME")
LONGEST = 80


def check_split(text: str) -> str:
    """Raises `InvalidName` for a word that usage cannot be split by."""
    is_tag = text.startswith(TAG) and text != TAG and len(text) <= LONGEST
    if is_tag:
        return check_text(text, "breakdown")
    if text not in (*OF_ROLLUPS, *OF_REQUESTS):
        raise InvalidName(f"usage is split by {', '.join(SPLITS)}, and not by {text[:LONGEST]!r}")
    return text


def part_of(split: str, entry: Entry) -> str:
    """Whose a charge is, where it is split by what a request says of itself."""
    details = entry.details
    if split.startswith(TAG):
        found = details.get("tags", {}).get(split.removeprefix(TAG))
    else:
        found = details.get(split)
    return str(found) if found else NOBODY


class HeavyParts:
    """Finds the dearest parts among any number of them, in bounded memory (Misra and Gries, 1982).

    Whatever costs more than a thousandth of the whole is among those that are left at the end.
    """

    def __init__(self, most: int = TRACKED) -> None:
        self._most = most
        self._left: dict[str, int] = {}

    def add(self, part: str, cost: int) -> None:
        self._left[part] = self._left.get(part, 0) + cost + 1  # so that free requests count too
        if len(self._left) >= 2 * self._most:
            least = sorted(self._left.values(), reverse=True)[self._most]
            self._left = {name: cost - least for name, cost in self._left.items() if cost > least}

    def dearest(self, most: int = LISTED) -> frozenset[str]:
        ordered = sorted(self._left, key=lambda part: (-self._left[part], part))
        return frozenset(ordered[:most])
