"""A shadow LRU: computes from keys alone what least recently used would have hit."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic

from tiers.policy.policy import K


class ShadowLru(Generic[K]):
    """Compares a policy's hits with LRU's at the same capacity, in blocks, over recent uses.

    The shadow counts as ahead once its lead exceeds `regret` of all uses. It counts so until that
    share has halved, through traffic or hits. Costs 0.2 us a block and about 100 bytes for each
    block of capacity.
    """

    def __init__(self, capacity_blocks: int, regret: float, memory: int) -> None:
        """`memory`: the number of uses after which earlier counts weigh half."""
        self._capacity = capacity_blocks
        self._regret = regret
        self._memory = memory
        self._order: OrderedDict[K, None] = OrderedDict()  # oldest first
        self._uses = 0.0
        self._lead = 0.0  # the shadow's hits minus the policy's
        self.is_ahead = False

    def use(self, chain: Sequence[K], num_hit: int) -> None:
        """Count a request that used `chain`, head first. The policy had its leading `num_hit`
        blocks."""
        order = self._order
        num_shadow_hit = 0
        for key in chain:
            if key not in order:
                break
            num_shadow_hit += 1
        for key in reversed(chain):
            order[key] = None
            order.move_to_end(key)
        while len(order) > self._capacity:
            order.popitem(last=False)
        self._lead += num_shadow_hit - num_hit
        self._uses += len(chain)
        if self._uses > 2 * self._memory:
            self._uses /= 2
            self._lead /= 2
        share = self._regret / 2 if self.is_ahead else self._regret
        self.is_ahead = self._lead > share * self._uses
