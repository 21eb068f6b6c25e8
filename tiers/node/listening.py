"""Events of the node's blocks for clients that listen by long polling.

Between two polls, the stream's subscription keeps events up to its bound. The node's thread only.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from tiers.blocks.keys import PrefixKey
from tiers.errors import NodeError
from tiers.telemetry.events import BlockEvent, EventKind, EventStream
from tiers.tier import Cause, TierName

WAIT_S = 2.0  # a poll without events is answered after this
MOST_EVENTS = 1024  # in one answer: 1.5 MB at 128 tokens a block
_KEYS = ("key", "parent", "scope")


class Listener:
    """One client's place in the stream, and the pending answer to its last poll."""

    def __init__(self, stream: EventStream, wake: Callable[[], None]) -> None:
        self._stream = stream
        self._subscription = stream.subscribe(wake)
        self._until_s = 0.0

    def ask(self) -> None:
        self._until_s = time.monotonic() + WAIT_S

    @property
    def is_ready(self) -> bool:
        return self._subscription.num_waiting > 0 or time.monotonic() >= self._until_s

    def answer(self) -> dict[str, Any]:
        events = [event_fields(event) for event in self._subscription.take(MOST_EVENTS)]
        return {"events": events, "missed": self._subscription.missed}

    def close(self) -> None:
        self._stream.unsubscribe(self._subscription)


def event_fields(event: BlockEvent) -> dict[str, Any]:
    """An event as JSON."""
    fields: dict[str, Any] = {"kind": str(event.kind), "tier": str(event.tier)}
    for name in (*_KEYS, "tokens"):
        if value := getattr(event, name):
            fields[name] = value.hex()
    if event.nbytes:
        fields["nbytes"] = event.nbytes
    for name in ("source", "cause"):
        if (value := getattr(event, name)) is not None:
            fields[name] = str(value)
    return fields


def publish_fields(stream: EventStream, fields: Mapping[str, Any]) -> None:
    """Publish a node's event in this process's stream. Raises NodeError if it is not an event."""
    try:
        keys = {name: PrefixKey(bytes.fromhex(fields[name])) for name in _KEYS if name in fields}
        stream.publish(
            EventKind(fields["kind"]),
            TierName(fields["tier"]),
            **keys,
            tokens=bytes.fromhex(fields.get("tokens", "")),
            nbytes=int(fields.get("nbytes", 0)),
            source=TierName(fields["source"]) if "source" in fields else None,
            cause=Cause(fields["cause"]) if "cause" in fields else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise NodeError(f"an event of the node cannot be read: {error!r}") from error
