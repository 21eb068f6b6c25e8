"""The names of the eviction policies, for settings and commands: nothing else is imported."""

from collections.abc import Iterable
from enum import StrEnum


class PolicyName(StrEnum):
    """The policies that can serve. Belady's MIN is not one of them: it needs the future."""

    LRU = "lru"
    ARC = "arc"
    ADAPTIVE = "adaptive"


# By how many points each removed policy hit less than LRU, on the worst of the measured loads.
_REMOVED = {"cost_aware": 39, "sieve": 35, "fifo": 16, "s3fifo": 12}


def unknown_policy(name: str, known: Iterable[str]) -> str:
    """What to say of a name that no policy has; `known` are those to choose from."""
    if name in _REMOVED:
        return (
            f"the policy {name} was removed: it hit up to {_REMOVED[name]} points less than lru; "
            "use lru, or adaptive for a small device"
        )
    return f"there is no policy {name!r}; the policies are {', '.join(known)}"
