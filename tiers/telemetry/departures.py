"""What the cache remembers of blocks that left it, so that a miss can be told from a first sight.

Written where a block loses its last copy, read when a prompt misses. Engine thread only. Bounded:
the oldest departures are forgotten, after which a block looks as if it had never been seen.
"""

import time
from collections import OrderedDict
from typing import NamedTuple

from tiers.blocks.keys import PrefixKey
from tiers.telemetry.lifetimes import Cause
from tiers.tier import TierName

MAX_DEPARTURES = 65_536  # about 200 bytes each: 13 MB when full


class Departure(NamedTuple):
    """The end of a block's last copy. `at_s` is Unix time."""

    tier: TierName
    cause: Cause
    at_s: float


class Departures:
    """The latest departures by key."""

    def __init__(self, max_departures: int = MAX_DEPARTURES) -> None:
        self._max = max_departures
        self._left: OrderedDict[PrefixKey, Departure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def note(self, key: PrefixKey, tier: TierName, cause: Cause) -> None:
        """The last copy of `key` left `tier`; a later departure replaces an earlier one."""
        self._left[key] = Departure(tier, cause, time.time())
        self._left.move_to_end(key)
        if len(self._left) > self._max:
            self._left.popitem(last=False)

    def find(self, key: PrefixKey) -> Departure | None:
        return self._left.get(key)
