"""Attribution of charges to users, sessions and tags, and which of them a report lists. Pure.

Callers name users and tags, so every request can have a new one. A report lists the most expensive
and sums the rest. Its memory does not depend on their number, and no sum is estimated.
"""

from billing.errors import InvalidName
from billing.gate.entries import Entry
from billing.names import check_text

LISTED = 100  # parts of a tenant in a report
TRACKED = 1_000  # candidates for the most expensive
OTHERS = "(others)"
NOBODY = "-"
OF_ROLLUPS = {"model": "model", "project": "project", "key": "key_id"}  # word and column
OF_REQUESTS = ("session", "user")
TAG = "tag:"
SPLITS = (*OF_ROLLUPS, *OF_REQUESTS, f"{TAG}NAME")
LONGEST = 80


def check_split(text: str) -> str:
    """The split. Raises `InvalidName` if usage cannot be split by this word."""
    is_tag = text.startswith(TAG) and text != TAG and len(text) <= LONGEST
    if is_tag:
        return check_text(text, "breakdown")
    if text not in (*OF_ROLLUPS, *OF_REQUESTS):
        raise InvalidName(f"usage is split by {', '.join(SPLITS)}, and not by {text[:LONGEST]!r}")
    return text


def part_of(split: str, entry: Entry) -> str:
    """The part of a charge, for splits by a request's own labels."""
    details = entry.details
    if split.startswith(TAG):
        found = details.get("tags", {}).get(split.removeprefix(TAG))
    else:
        found = details.get(split)
    return str(found) if found else NOBODY


class HeavyParts:
    """Finds the most expensive of any number of parts, in bounded memory (Misra and Gries, 1982).

    Every part that costs more than a thousandth of the total is among the result.
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
