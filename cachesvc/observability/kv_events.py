"""Block events over ZMQ in vLLM's format, for routers made for vLLM.

    PUB     topic, number (8 bytes, big-endian), msgpack of [ts, events, data_parallel_rank]
    ROUTER  asked with a number, answers with each kept batch from there on as it was published,
            and ends with (empty, -1, empty)

An event (BlockStored, BlockRemoved or AllBlocksCleared) is a map tagged `type`, as vLLM writes them
from 0.24 on. Block hashes are the last 64 bits of our keys, and `medium` is GPU, CPU or DISK. The
format is that of vllm/distributed/kv_events.py.

One thread of its own, which owns both sockets. Needs the extra `events`; nothing else imports zmq
or msgspec.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import EventsSection, ZmqTable
from cachesvc.observability.kv_replay import KvReplay, bounded
from tiers.blocks.keys import PrefixKey
from tiers.telemetry.events import BlockEvent, EventKind, EventStream
from tiers.tier import TierName

logger = logging.getLogger(__name__)

MEDIA = {TierName.DEVICE: "GPU", TierName.HOST: "CPU"}  # a tier below memory has its own name
GATHER_S = 0.005  # events of one step travel in one batch
_HASH_BYTES = 8


@contextlib.contextmanager
def published(settings: EventsSection, stream: EventStream) -> Iterator[None]:
    """Publishes the stream's events while the block runs, if the settings enable it.

    Raises ConfigError.
    """
    if settings.publisher is None:
        yield
        return
    with contextlib.closing(KvEventPublisher(stream, settings.publisher)) as publisher:
        publisher.start()
        yield


class KvEventPublisher:
    """Publishes a stream's events until closed. Sequence numbers begin at 0 with each server."""

    def __init__(self, stream: EventStream, settings: ZmqTable) -> None:
        """Binds the sockets. Raises ConfigError if that fails."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError(
                f"events.zmq needs the extra `events` ({error.name} is not installed): "
                "pip install 'cachesvc[events]', or leave events.zmq empty"
            ) from None
        self._zmq = zmq
        self._pack = msgspec.msgpack.Encoder().encode
        self._stream = stream
        self._settings = settings
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._bind(self._pub, settings.endpoint, "events.zmq")
            self._router = self._replay = None
            if endpoint := settings.replay_endpoint:
                self._router = bounded(self._context.socket(zmq.ROUTER))
                self._bind(self._router, endpoint, "events.zmq.replay_endpoint")
                self._replay = KvReplay(self._router, settings.topic.encode())
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._number = self._missed = 0
        self._closing = False
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._subscription = stream.subscribe(self._wake)
        self._thread = threading.Thread(target=self._run, name="cachesvc-kv-events", daemon=True)

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """The endpoints for subscribers and replay requests, with the bound ports."""
        last = self._zmq.LAST_ENDPOINT
        replay = self._router.getsockopt_string(last) if self._router is not None else None
        return self._pub.getsockopt_string(last), replay

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Sends the remaining events and closes the sockets."""
        self._closing = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        self._stream.unsubscribe(self._subscription)
        self._context.destroy(linger=100)
        self._waker.close()
        self._woken.close()

    def _bind(self, opened: Any, endpoint: str, setting: str) -> None:
        try:
            opened.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen on {setting} = {endpoint!r}: {error}; write it like "
                "tcp://127.0.0.1:5557, on a free port of this machine"
            ) from None

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: the thread is awake already
            self._waker.send(b"\0")

    # The publisher's thread.

    def _run(self) -> None:
        try:
            self._publish([{"type": "AllBlocksCleared"}])  # a new server: what was known is void
            while not self._closing:
                self._serve()
            self._publish_taken()
        except Exception:
            logger.exception("the publisher of block events has failed")

    def _serve(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._woken.fileno(), self._zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, self._zmq.POLLIN)
        ready = dict(poller.poll(self._replay.retry_ms if self._replay is not None else None))
        if self._replay is not None:
            self._replay.take_requests()
            self._replay.send_owed()
        if self._woken.fileno() in ready:
            time.sleep(GATHER_S)
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
            self._publish_taken()

    def _publish_taken(self) -> None:
        events = self._subscription.take()
        if self._subscription.missed > self._missed:
            # Lost removals would make a router send prompts to missing blocks, so clear all.
            self._missed = self._subscription.missed
            logger.warning(f"{self._missed} block events were lost so far; routers start afresh")
            self._publish([{"type": "AllBlocksCleared"}])
        if batch := list(wire_events(events)):
            self._publish(batch)

    def _publish(self, events: list[dict[str, Any]]) -> None:
        payload = self._pack([time.time(), events, 0])
        number = self._number.to_bytes(8, "big")
        self._number += 1
        if self._replay is not None:
            self._replay.keep(payload)
        self._pub.send_multipart((self._settings.topic.encode(), number, payload))


def wire_events(events: Sequence[BlockEvent]) -> Iterator[dict[str, Any]]:
    """The events in vLLM's form. Consecutive blocks in one tier become one event."""
    run: list[BlockEvent] = []
    for event in events:
        if run and not _continues(run[-1], event):
            yield _message(run)
            run = []
        run.append(event)
    if run:
        yield _message(run)


def block_hash(key: PrefixKey) -> int:
    """64 bits of a key, as routers compare them."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")


def _continues(before: BlockEvent, event: BlockEvent) -> bool:
    if before.tier is not event.tier or event.kind is EventKind.CLEARED:
        return False
    if event.kind is EventKind.REMOVED:
        return before.kind is EventKind.REMOVED
    stores = before.kind in (EventKind.STORED, EventKind.MOVED)
    return stores and event.parent == before.key


def _message(run: Sequence[BlockEvent]) -> dict[str, Any]:
    first = run[0]
    if first.kind is EventKind.CLEARED:
        return {"type": "AllBlocksCleared"}
    hashes = [block_hash(event.key) for event in run if event.key is not None]
    medium = MEDIA.get(first.tier, first.tier.upper())
    if first.kind is EventKind.REMOVED:
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
    begins = first.parent is None or first.parent == first.scope
    scope = first.scope.hex() if first.scope is not None else ""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if begins or first.parent is None else block_hash(first.parent),
        "token_ids": [token for event in run for token in event.token_ids()],
        "block_size": first.num_tokens,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "extra_keys": [(scope,) for _ in run],  # like vLLM's cache salt: the owner's scope
    }
