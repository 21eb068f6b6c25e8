"""The names of the eviction policies, for settings and commands. Imports nothing else."""

from collections.abc import Iterable
from enum import StrEnum


class PolicyName(StrEnum):
    """The policies that can serve. Belady's MIN cannot, because it needs to know the future."""

    LRU = "lru"
    ARC = "arc"
    ADAPTIVE = "adaptive"


# Removed policies, and how many points below LRU each one's hit rate was on its worst load.
_REMOVED = {"cost_aware": 39, "sieve": 35, "fifo": 16, "s3fifo": 12}


def unknown_policy(name: str, known: Iterable[str]) -> str:
    """The error message for an unknown policy name. `known` lists the names to choose from."""
    if name in _REMOVED:
        return (
            f"the policy {name} was removed: it hit up to {_REMOVED[name]} points less than lru; "
            "use lru, or adaptive for a small device"
        )
    return f"there is no policy {name!r}; the policies are {', '.join(known)}"
