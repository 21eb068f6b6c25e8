"""The eviction policies by name, and which of them each tier has."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from tiers.errors import ConfigurationError
from tiers.policy.adaptive import Adaptive
from tiers.policy.arc import Arc
from tiers.policy.lru import Lru
from tiers.policy.policy import Policy
from tiers.tier import TierName


class PolicyName(StrEnum):
    """The policies that can serve. Belady's MIN is not one of them: it needs the future."""

    LRU = "lru"
    ARC = "arc"
    ADAPTIVE = "adaptive"


_FACTORIES: dict[PolicyName, Callable[[int], Policy[Any]]] = {
    PolicyName.LRU: lambda capacity: Lru(),
    PolicyName.ARC: Arc,
    PolicyName.ADAPTIVE: Adaptive,
}
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


def make_policy(name: str, capacity_blocks: int) -> Policy[Any]:
    """A policy for a tier of `capacity_blocks` blocks; it never counts them, the tier does."""
    try:
        factory = _FACTORIES[PolicyName(name)]
    except ValueError:
        raise ConfigurationError(unknown_policy(name, PolicyName)) from None
    return factory(capacity_blocks)


def policy_in(tier: TierName, name: str) -> str:
    """The policy that a tier has where `name` is the cache's.

    `adaptive` learns from whole chains used at once. The host sees blocks one by one as they come
    down, and is LRU then. What lies below memory keeps its own order, which is LRU.
    """
    if tier is TierName.DEVICE or (tier is TierName.HOST and name != PolicyName.ADAPTIVE):
        return name
    return PolicyName.LRU
