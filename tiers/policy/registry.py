"""The eviction policies by name, and which of them each tier has."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from tiers.errors import ConfigurationError
from tiers.policy.adaptive import Adaptive
from tiers.policy.arc import Arc
from tiers.policy.fifo import Fifo
from tiers.policy.lru import Lru
from tiers.policy.policy import Policy
from tiers.policy.s3fifo import S3Fifo
from tiers.policy.sieve import Sieve
from tiers.tier import TierName


class PolicyName(StrEnum):
    """The policies that can serve. Belady's MIN is not one of them: it needs the future."""

    LRU = "lru"
    FIFO = "fifo"
    SIEVE = "sieve"
    S3FIFO = "s3fifo"
    ARC = "arc"
    ADAPTIVE = "adaptive"


_FACTORIES: dict[PolicyName, Callable[[int], Policy[Any]]] = {
    PolicyName.LRU: lambda capacity: Lru(),
    PolicyName.FIFO: lambda capacity: Fifo(),
    PolicyName.SIEVE: lambda capacity: Sieve(),
    PolicyName.S3FIFO: S3Fifo,
    PolicyName.ARC: Arc,
    PolicyName.ADAPTIVE: Adaptive,
}


def make_policy(name: str, capacity_blocks: int) -> Policy[Any]:
    """A policy for a tier of `capacity_blocks` blocks; it never counts them, the tier does."""
    if name == "cost_aware":
        raise ConfigurationError(
            "the policy cost_aware was removed: it hit up to 39 points less than lru; use lru, or "
            "adaptive for a small device"
        )
    try:
        factory = _FACTORIES[PolicyName(name)]
    except ValueError:
        known = ", ".join(PolicyName)
        raise ConfigurationError(f"there is no policy {name!r}; the policies are {known}") from None
    return factory(capacity_blocks)


def policy_in(tier: TierName, name: str) -> str:
    """The policy that a tier has where `name` is the cache's.

    `adaptive` learns from whole chains used at once. The host sees blocks one by one as they come
    down, and is LRU then. What lies below memory keeps its own order, which is LRU.
    """
    if tier is TierName.DEVICE or (tier is TierName.HOST and name != PolicyName.ADAPTIVE):
        return name
    return PolicyName.LRU
