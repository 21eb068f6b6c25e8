"""Block events, published as they happen, for routers.

The residency publishes on the engine thread and the disk tier on its writer thread. Each subscriber
reads on its own thread. A publisher never waits: each subscription has a bounded queue that drops
its oldest events and counts them. While nobody listens, an event costs one check of `listening`.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tiers.blocks.keys import TOKEN_BYTES, PrefixKey, token_ids
from tiers.tier import Cause, TierName

QUEUE_EVENTS = 16_384  # per subscription; about 200 bytes each


class CacheEvent(StrEnum):
    """What can happen to a block in a tier. The label values of `cachesvc_cache_events_total`."""

    STORED = "stored"  # its KV is now in the tier
    PROMOTED = "promoted"  # copied up out of the tier
    DEMOTED = "demoted"  # copied down out of the tier
    EVICTED = "evicted"  # left the tier to make room
    LOST = "lost"  # evicted while no lower tier held it
    SKIPPED = "skipped"  # not copied down, by the write policy's decision
    PURGED = "purged"  # removed on request


class EventKind(StrEnum):
    """The kinds of published events. After `stored` and `moved` the tier holds the block."""

    STORED = "stored"  # computed, written or imported into the tier
    MOVED = "moved"  # copied into the tier from `source`, which may still hold it
    REMOVED = "removed"  # the tier no longer holds it; `cause` is the reason
    CLEARED = "cleared"  # the tier is now empty


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One event of one block.

    `tokens` holds int32 little-endian ids if the publisher knows them. `nbytes` is the block's size
    in the tier, or 0 if unknown.
    """

    kind: EventKind
    tier: TierName
    key: PrefixKey | None = None
    parent: PrefixKey | None = None
    scope: PrefixKey | None = None
    tokens: bytes = b""
    nbytes: int = 0
    source: TierName | None = None
    cause: Cause | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def token_ids(self) -> list[int]:
        return token_ids(self.tokens)


class Subscription:
    """One listener's queue. Only the listener calls `take`, on any one thread.

    `missed` counts the events dropped for lack of room.
    """

    def __init__(self, wake: Callable[[], None], capacity: int) -> None:
        self._wake = wake
        self._capacity = capacity
        self._queue: deque[BlockEvent] = deque()
        self._lock = threading.Lock()
        self.missed = 0

    def take(self) -> list[BlockEvent]:
        """Events since the last call, oldest first."""
        with self._lock:
            taken, self._queue = list(self._queue), deque()
            return taken

    def put(self, event: BlockEvent) -> bool:
        """The stream adds an event, and wakes a listener without any. False if one was dropped."""
        with self._lock:
            empty, full = not self._queue, len(self._queue) == self._capacity
            if full:
                self._queue.popleft()
                self.missed += 1
            self._queue.append(event)
        if empty:
            self._wake()
        return not full


class EventStream:
    """Passes events to every subscription, in one order for all. Any thread."""

    def __init__(self) -> None:
        self.num_missed = 0  # events dropped for all slow listeners together
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []

    @property
    def listening(self) -> bool:
        """Read without the lock, before each publish."""
        return bool(self._subscriptions)

    @property
    def num_subscribers(self) -> int:
        return len(self._subscriptions)

    def subscribe(
        self, wake: Callable[[], None] = lambda: None, *, capacity: int = QUEUE_EVENTS
    ) -> Subscription:
        """Subscribe to events from now on.

        `wake` is called on a publisher's thread when the queue stops being empty. It must not wait.
        """
        subscription = Subscription(wake, capacity)
        with self._lock:
            self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions.remove(subscription)

    def publish(
        self,
        kind: EventKind,
        tier: TierName,
        *,
        key: PrefixKey | None = None,
        parent: PrefixKey | None = None,
        scope: PrefixKey | None = None,
        tokens: bytes = b"",
        nbytes: int = 0,
        source: TierName | None = None,
        cause: Cause | None = None,
    ) -> None:
        """Send an event to all subscribers. Call it only while `listening`."""
        event = BlockEvent(kind, tier, key, parent, scope, tokens, nbytes, source, cause)
        with self._lock:
            for subscription in self._subscriptions:
                self.num_missed += not subscription.put(event)
