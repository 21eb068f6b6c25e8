"""Makes the eviction policies, and says which of them each tier has."""

from collections.abc import Callable
from typing import Any

from tiers.errors import ConfigurationError
from tiers.policy.adaptive import Adaptive
from tiers.policy.arc import Arc
from tiers.policy.lru import Lru
from tiers.policy.names import PolicyName, unknown_policy
from tiers.policy.policy import Policy
from tiers.tier import TierName

_FACTORIES: dict[PolicyName, Callable[[int], Policy[Any]]] = {
    PolicyName.LRU: lambda capacity: Lru(),
    PolicyName.ARC: Arc,
    PolicyName.ADAPTIVE: Adaptive,
}


def make_policy(name: str, capacity_blocks: int) -> Policy[Any]:
    """A policy for a tier of `capacity_blocks` blocks. The tier counts its blocks, not the
    policy."""
    try:
        factory = _FACTORIES[PolicyName(name)]
    except ValueError:
        raise ConfigurationError(unknown_policy(name, PolicyName)) from None
    return factory(capacity_blocks)


def policy_in(tier: TierName, name: str) -> str:
    """The policy of a tier in a cache whose policy is `name`.

    `adaptive` learns from whole chains used at once. The host receives blocks one by one as they
    are demoted, so with `adaptive` it uses LRU. Tiers below memory keep their own order, which is
    LRU.
    """
    if tier is TierName.DEVICE or (tier is TierName.HOST and name != PolicyName.ADAPTIVE):
        return name
    return PolicyName.LRU
