"""Decides which blocks to copy down, and what happens to the lower copy after a promotion.

This is separate from eviction. An eviction policy chooses which block leaves a tier; admission
chooses which may enter the one below, where every entry is a write. Pure. Driven by the demoter on
the engine thread and by `tiers.replay.replay`.
"""

from collections import OrderedDict
from enum import StrEnum
from typing import Generic

from tiers.policy.policy import K

KEEP_SHARE = 1 / 8  # from the replays in docs/policies.md, "keep or move"


class WritePolicy(StrEnum):
    """When a block is copied to the tier below."""

    ON_EVICT = "on_evict"  # when it nears the cold end of its tier
    WRITE_THROUGH = "write_through"  # as soon as it is full
    ON_SECOND_HIT = "on_second_hit"  # at its second use; a block used once is never written


def keeps_copies(above: int, total: int) -> bool:
    """Whether a tier keeps its copy of a promoted block like any other. If not, it leaves first.

    `above` is the capacity of the tiers above it, `total` that of all tiers. Keeping copies holds
    at most `above` twice, and costs hits as if the whole cache were smaller by that much. That is
    almost nothing if `above` is a small share of `total`. It may be a large share of the tier
    itself, because blocks that leave this tier go to the next. A tier that does not keep copies
    writes a block again each time it is promoted and demoted.
    """
    return above <= KEEP_SHARE * total


class Demotion(Generic[K]):
    """Decides when each block is copied down. Call `on_use` at each use and `on_evict` at eviction.

    Under ON_SECOND_HIT, a use also counts if the block was evicted and computed again since the
    first, as long as its ghost is remembered: its key, some 150 bytes. `num_ghosts` should be
    several times the tier's number of blocks.
    """

    def __init__(self, write_policy: WritePolicy, num_ghosts: int) -> None:
        self.write_policy = write_policy
        self._num_ghosts = max(1, num_ghosts)
        self._ghosts: OrderedDict[K, None] = OrderedDict()  # the oldest is forgotten first

    def on_use(self, key: K) -> bool:
        """Whether a block that was just made or used should be copied down now."""
        if self.write_policy is WritePolicy.WRITE_THROUGH:
            return True
        return self.write_policy is WritePolicy.ON_SECOND_HIT and self._was_seen(key)

    def _was_seen(self, key: K) -> bool:
        seen = key in self._ghosts
        self._ghosts[key] = None
        self._ghosts.move_to_end(key)
        if len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)
        return seen

    def on_evict(self, key: K) -> bool:
        """Whether a block that no lower tier holds should be copied down before it leaves."""
        return self.write_policy is not WritePolicy.ON_SECOND_HIT
