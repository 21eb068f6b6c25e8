"""Block events, published as they happen to routers, dashboards and `cachesvc monitor`.

The residency publishes on the engine thread and the disk tier on its writer thread. Each subscriber
reads on its own thread. A publisher never waits: each subscription has a bounded queue that drops
its oldest events and counts them. While nobody listens, an event costs one check of `listening`.
That begins some time after the last subscriber left, so that it can come back and replay what it
missed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tiers.blocks.keys import TOKEN_BYTES, PrefixKey, token_ids
from tiers.tier import Cause, TierName

RING_EVENTS = 16_384  # kept for replay; about 200 bytes each
QUEUE_EVENTS = 16_384  # per subscription
LINGER_S = 120.0  # how long events are kept for a subscriber that may come back


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
    """One event of one block. `number` grows by one, and goes on growing after a restart.

    `tokens` holds int32 little-endian ids if the publisher knows them. `nbytes` is the block's size
    in the tier, or 0 if unknown.
    """

    number: int
    kind: EventKind
    tier: TierName
    time_s: float
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

    `missed` counts the events dropped for lack of room. `gap` is set if events before the first one
    are lost; a returning listener must then read the whole state again.
    """

    def __init__(self, wake: Callable[[], None], capacity: int) -> None:
        self._wake = wake
        self._capacity = capacity
        self._queue: deque[BlockEvent] = deque()
        self._lock = threading.Lock()
        self.missed = 0
        self.gap = False

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def take(self, most: int = QUEUE_EVENTS) -> list[BlockEvent]:
        """Events since the last call, oldest first. At most `most` of them."""
        with self._lock:
            if len(self._queue) <= most:
                taken, self._queue = list(self._queue), deque()
                return taken
            return [self._queue.popleft() for _ in range(most)]

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
    """Passes events to every subscription and keeps the latest for replay. Any thread."""

    def __init__(
        self,
        *,
        ring: int = RING_EVENTS,
        linger_s: float = LINGER_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.listening = False  # read without the lock, before each publish
        self.num_missed = 0  # events dropped for all slow listeners together
        self._clock = clock
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._ring: deque[BlockEvent] = deque(maxlen=ring)
        self._subscriptions: list[Subscription] = []
        self._left_s = 0.0  # when the last subscriber went
        # Microseconds since 1970, so that numbers go on growing after a restart.
        self._next = int(clock() * 1e6)

    @property
    def num_subscribers(self) -> int:
        return len(self._subscriptions)

    def subscribe(
        self,
        wake: Callable[[], None] = lambda: None,
        *,
        after: int | None = None,
        capacity: int = QUEUE_EVENTS,
    ) -> Subscription:
        """Subscribe to events from now on. With `after`, kept events after that number come first.

        `wake` is called on a publisher's thread when the queue stops being empty. It must not wait.
        """
        subscription = Subscription(wake, capacity)
        with self._lock:
            if not self.listening:
                self._ring.clear()
                self.listening = True
            if after is not None:
                kept = [event for event in self._ring if event.number > after]
                subscription.gap = (kept[0].number if kept else self._next) != after + 1
                for event in kept:
                    subscription.put(event)
            self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions.remove(subscription)
            self._left_s = self._clock()

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
        """Send an event to all subscribers. Call it only while `listening` is set."""
        now_s = self._clock()
        with self._lock:
            if not self._subscriptions and now_s - self._left_s > self._linger_s:
                self.listening = False
                self._next += 1  # later missed events show as a gap
                return
            event = BlockEvent(
                self._next, kind, tier, now_s, key, parent, scope, tokens, nbytes, source, cause
            )
            self._next += 1
            self._ring.append(event)
            for subscription in self._subscriptions:
                self.num_missed += not subscription.put(event)
