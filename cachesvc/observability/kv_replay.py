"""Batches of block events that were published, kept for routers that missed some.

Asked with a number, it answers with every kept batch from there on, and ends with END. A router
gets what its queue takes and the rest as it reads: one that reads slowly loses nothing, and one
that never reads holds the memory of a short queue. Owned by the publisher's thread, which alone may
call it.
"""

import logging
from collections import deque
from typing import Any

logger = logging.getLogger(__name__)

KEPT_BATCHES = 10_000
KEPT_BYTES = 64 << 20  # a batch of a prompt of 32,000 tokens has 0.1 MB
RETRY_MS = 5  # how often a router that reads slowly is looked after
END = (-1).to_bytes(8, "big", signed=True)
_NUMBER_BYTES = len(END)
_QUEUED_BATCHES = 100  # to one router
_REQUEST_BYTES = 1024  # a longer frame ends its connection unread
_ASKED_AT_ONCE = 100  # requests read before batches are published again


def bounded(router: Any) -> Any:
    """A ROUTER socket, before it is bound, as `KvReplay` needs it."""
    import zmq

    router.setsockopt(zmq.SNDHWM, _QUEUED_BATCHES)
    router.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is told, not dropped
    return router


class KvReplay:
    """The kept batches, and which router is owed which. Numbers begin at 0 and have no gaps."""

    def __init__(self, router: Any, topic: bytes) -> None:
        import zmq

        self._zmq = zmq
        self._router = router
        self._topic = topic
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._stop = 0  # the number that the next batch will have
        self._owed: dict[bytes, int] = {}  # of each router that is not done its next number

    @property
    def retry_ms(self) -> int | None:
        """After how long `send_owed` has something to do; None where no router waits."""
        return RETRY_MS if self._owed else None

    def keep(self, payload: bytes) -> None:
        self._kept.append(payload)
        self._kept_bytes += len(payload)
        self._stop += 1
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())

    def take_requests(self) -> None:
        """Read the requests that have come. A router that asks again is answered from there on."""
        for _ in range(_ASKED_AT_ONCE):
            try:
                frames = self._router.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
                logger.warning("a replay request is not an 8-byte sequence number; ignored")
                continue
            self._owed[frames[0]] = int.from_bytes(frames[2], "big")

    def send_owed(self) -> None:
        for client in list(self._owed):
            if self._is_answered(client):
                del self._owed[client]

    def _is_answered(self, client: bytes) -> bool:
        try:
            first = self._stop - len(self._kept)
            for number in range(max(self._owed[client], first), self._stop):
                payload = self._kept[number - first]
                self._send(client, self._topic, number.to_bytes(_NUMBER_BYTES, "big"), payload)
                self._owed[client] = number + 1
            self._send(client, b"", END, b"")
        except self._zmq.Again:
            return False
        except self._zmq.ZMQError as error:
            if error.errno != self._zmq.EHOSTUNREACH:  # it has gone
                raise
        return True

    def _send(self, client: bytes, topic: bytes, number: bytes, payload: bytes) -> None:
        self._router.send_multipart((client, b"", topic, number, payload), self._zmq.NOBLOCK)
