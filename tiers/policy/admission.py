"""Which blocks are worth copying down, and what becomes of the copy below when one comes up again.

Its own question, apart from eviction: an eviction policy chooses who leaves a tier, admission who
may enter the one below, where every entry is a write. Pure; driven by the demoter on the engine
thread and by `tiers.replay.replay`.
"""

from collections import OrderedDict
from enum import StrEnum
from typing import Generic

from tiers.policy.policy import K

AUTO_KEEP_SHARE = 1 / 8  # see docs/policies.md, "keep or move", for the replays behind it


class WritePolicy(StrEnum):
    """When a block is copied to the tier below."""

    ON_EVICT = "on_evict"  # when it nears the cold end of its tier
    WRITE_THROUGH = "write_through"  # as soon as it is full
    ON_SECOND_HIT = "on_second_hit"  # once it was used again: a block used once is never written


class Promotion(StrEnum):
    """What becomes of the copy below when a block is promoted."""

    KEEP = "keep"  # it stays and ages like any other: fewest writes, room held twice
    MOVE = "move"  # it is the first to leave when that tier needs room: most blocks held
    AUTO = "auto"  # for each tier: keep where what is held twice is a small share of all room

    def keeps(self, above_bytes: int, total_bytes: int) -> bool:
        """Whether copies stay in a tier that has `above_bytes` of tiers over it.

        At most `above_bytes` are then held twice, which costs hits as if the whole cache were so
        much smaller: next to nothing where that is a small share of it, even if it is a large one
        of the tier itself, for what leaves that tier goes to the next. Moving writes again every
        block that comes up and goes down.
        """
        if self is Promotion.AUTO:
            return above_bytes <= AUTO_KEEP_SHARE * total_bytes
        return self is Promotion.KEEP


class GhostList(Generic[K]):
    """Keys seen lately, without their blocks. At most `capacity`, the oldest forgotten first.

    About 150 bytes a key with its 16-byte key object.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._keys: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: K) -> bool:
        return key in self._keys

    def see(self, key: K) -> bool:
        """Remember `key` as the newest; whether it was remembered already."""
        seen = key in self._keys
        if seen:
            self._keys.move_to_end(key)
        else:
            self._keys[key] = None
            if len(self._keys) > self._capacity:
                self._keys.popitem(last=False)
        return seen


class Demotion(Generic[K]):
    """Says of each block when it is copied down. Ask `on_use` at each use, `on_evict` at eviction.

    Under ON_SECOND_HIT a use counts also when the block was evicted and computed again in between,
    as long as the ghost list remembers it; `num_ghosts` should be several times the tier's blocks.
    """

    def __init__(self, write_policy: WritePolicy, num_ghosts: int) -> None:
        self.write_policy = write_policy
        self._seen: GhostList[K] = GhostList(num_ghosts)

    def on_use(self, key: K) -> bool:
        """Whether a block that was just made or used should be copied down now."""
        if self.write_policy is WritePolicy.WRITE_THROUGH:
            return True
        return self.write_policy is WritePolicy.ON_SECOND_HIT and self._seen.see(key)

    def on_evict(self, key: K) -> bool:
        """Whether a block that no lower tier holds should be copied down before it leaves."""
        return self.write_policy is not WritePolicy.ON_SECOND_HIT


class WriteBudget:
    """A token bucket of bytes: bounds what a tier writes per day, for the life of its medium.

    Full at first; `take` refuses what exceeds it. Time comes from the caller and may not run
    backwards.
    """

    def __init__(self, bytes_per_day: float, burst_bytes: float) -> None:
        self._rate = bytes_per_day / 86_400
        self._burst = burst_bytes
        self._available = burst_bytes
        self._time_s: float | None = None

    def take(self, nbytes: int, now_s: float) -> bool:
        """Whether `nbytes` may be written now; they are then spent."""
        if self._time_s is not None:
            earned = max(0.0, now_s - self._time_s) * self._rate
            self._available = min(self._burst, self._available + earned)
        self._time_s = now_s
        if nbytes > self._available:
            return False
        self._available -= nbytes
        return True
