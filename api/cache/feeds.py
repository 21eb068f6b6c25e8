"""Open feeds of block events on the event loop, as server-sent events.

    EventStream ─► Subscription (bounded, drops and counts) ─► Feed ─► text/event-stream

The publishers' threads only wake the loop. Events that a slow client has not read wait in its
bounded subscription. A client that reads nothing for the write timeout is disconnected. Tenants
share a bounded number of feeds. Event loop only.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.access.shares import Shares
from api.errors import Overloaded
from tiers.blocks.keys import PrefixKey
from tiers.telemetry.events import BlockEvent, EventKind, EventStream, Subscription
from tiers.tier import TierName

MAX_FEEDS = 100
KEEPALIVE = b": keep-alive\n\n"
CLOSING = b"event: closing\ndata: {}\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which events a client asked for and may see, and in what detail."""

    scopes: frozenset[PrefixKey] | None = None  # None: all
    tiers: frozenset[TierName] = frozenset(TierName)
    kinds: frozenset[EventKind] = frozenset(EventKind)
    tokens: bool = False

    def passes(self, event: BlockEvent) -> bool:
        """Events without a block, such as a cleared tier, pass for everyone."""
        mine = self.scopes is None or event.scope is None or event.scope in self.scopes
        return mine and event.tier in self.tiers and event.kind in self.kinds


@dataclass(slots=True, eq=False)
class Feed:
    """One client's subscription, and the signal that wakes its task."""

    tenant: str
    subscription: Subscription
    woken: asyncio.Event
    closed: bool = False

    def close(self) -> None:
        self.closed = True
        self.woken.set()


@dataclass(slots=True)
class Feeds:
    """All open feeds of a server. `close` ends them, so that shutdown does not wait for clients."""

    stream: EventStream = field(default_factory=EventStream)
    _open: set[Feed] = field(default_factory=set)
    _shares: Shares = field(default_factory=lambda: Shares(MAX_FEEDS))
    _closed: bool = False

    def open(self, tenant: str, after: int | None) -> Feed:
        """A feed of events from now on, or after number `after`. Raises Overloaded."""
        if self._closed:
            raise Overloaded("The server is shutting down.")
        if not self._shares.take(tenant):
            raise Overloaded(
                f"{self._shares.used} clients listen to the cache's events, "
                f"{self._shares.held(tenant)} of them of this tenant, as many as are served; close "
                "one, or read them from the ZMQ publisher."
            )
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(woken.set)

        feed = Feed(tenant, self.stream.subscribe(wake, after=after), woken)
        self._open.add(feed)
        return feed

    def drop(self, feed: Feed) -> None:
        self._open.discard(feed)
        self._shares.give_back(feed.tenant)
        self.stream.unsubscribe(feed.subscription)

    def close(self) -> None:
        """End every feed; later ones are refused."""
        self._closed = True
        for feed in self._open:
            feed.close()


class FeedResponse(Response):
    """Sends a feed's events until the client disconnects or the feed is closed."""

    def __init__(
        self,
        feeds: Feeds,
        tenant: str,
        after: int | None,
        wanted: Filter,
        *,
        keepalive_s: float,
        write_timeout_s: float,
    ) -> None:
        super().__init__()
        self._feeds = feeds
        self._feed = feeds.open(tenant, after)
        self._wanted = wanted
        self._keepalive_s = keepalive_s
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self._serve(send)
        except OSError:  # the client disconnected or (TimeoutError) stopped reading
            pass
        finally:
            watcher.cancel()
            self._feeds.drop(self._feed)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._feed.close()

    async def _serve(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._write(send, {"type": "http.response.start", "status": 200, "headers": headers})
        told_missed, feed = 0, self._feed
        body = gap_event(None) if feed.subscription.gap else b": listening\n\n"
        while not feed.closed:
            if body:
                await self._write(
                    send, {"type": "http.response.body", "body": body, "more_body": True}
                )
            body = b""
            try:
                async with asyncio.timeout(self._keepalive_s):
                    await feed.woken.wait()
            except TimeoutError:
                body = KEEPALIVE
            feed.woken.clear()
            events = [event for event in feed.subscription.take() if self._wanted.passes(event)]
            missed = feed.subscription.missed
            if missed > told_missed:
                body += gap_event(missed - told_missed)
            told_missed = missed
            body += b"".join(block_event(event, tokens=self._wanted.tokens) for event in events)
        await self._write(send, {"type": "http.response.body", "body": CLOSING, "more_body": False})

    async def _write(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await send(message)


def block_event(event: BlockEvent, *, tokens: bool) -> bytes:
    """As JSON: keys in hex, times in Unix seconds."""
    payload: dict[str, Any] = {
        "number": event.number,
        "kind": event.kind,
        "tier": event.tier,
        "time_s": round(event.time_s, 6),
    }
    for name in ("key", "parent", "scope"):
        value = getattr(event, name)
        payload[name] = None if value is None else value.hex()
    payload |= {
        "num_tokens": event.num_tokens,
        "bytes": event.nbytes,
        "source": event.source,
        "cause": event.cause,
    }
    if tokens:
        payload["token_ids"] = event.token_ids()
    data = orjson.dumps(payload)
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.number, event.kind.encode(), data)


def gap_event(missed: int | None) -> bytes:
    """Says that `missed` events are lost; None: all since the client's last id."""
    return b"event: gap\ndata: " + orjson.dumps({"missed": missed}) + b"\n\n"
