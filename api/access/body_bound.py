"""Bounds on request bodies: on each one, and on all that are in memory at once.

They apply to every route and every reader. The framework reads the body of an admin route before
any dependency has checked the caller. Pure ASGI; a body passes through without a copy.
"""

from collections.abc import MutableMapping
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.access.shares import OPERATOR, Shares
from api.errors import BodyEncoded, BodyTooLarge, Overloaded

BODIES_AT_ONCE: Final = 16  # bodies of the largest size that fit in memory together


class BodyBound:
    """Rejects a body larger than `max_bytes`, with BodyTooLarge, as soon as that is known.

    All bodies together may take `BODIES_AT_ONCE` times that size, which tenants share. A body
    counts until its route has read and parsed it, that is, until the next message is requested.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._shares = Shares(BODIES_AT_ONCE * max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(self._max_bytes, self._shares, scope, receive)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release()


class _Body:
    """One request's body on its way in."""

    def __init__(self, max_bytes: int, shares: Shares, scope: Scope, receive: Receive) -> None:
        headers = dict(scope["headers"])
        self._encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        declared = headers.get(b"content-length", b"")
        self._expected = int(declared) if declared.isdigit() else 0
        self._max_bytes = max_bytes
        self._shares = shares
        self._scope: MutableMapping[str, Any] = scope
        self._receive = receive
        self._tenant = OPERATOR
        self._num_bytes = 0
        self._taken = 0
        self._whole = False

    async def receive(self) -> Message:
        if self._whole:
            self.release()
            return await self._receive()
        if self._encoding.lower() != "identity":
            raise BodyEncoded(
                f"The body has the Content-Encoding {self._encoding[:40]!r}; send it uncompressed.",
                headers={"Connection": "close"},
            )
        self._check(self._expected)
        message = await self._receive()
        self._whole = not message.get("more_body", False)
        self._take(len(message.get("body", b"")))
        return message

    def release(self) -> None:
        self._shares.give_back(self._tenant, self._taken)
        self._taken = 0

    def _take(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._check(self._num_bytes)
        if not self._taken:  # a route identifies the caller before it reads a body
            self._tenant = self._scope["state"]["request_log"].facts.get("tenant", OPERATOR)
        if not self._shares.take(self._tenant, num_bytes):
            raise Overloaded(
                f"{self._shares.used} bytes of request bodies are being read, as many as are "
                "allowed; retry shortly.",
                headers={"Connection": "close"},
            )
        self._taken += num_bytes

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise BodyTooLarge(
                f"The body is larger than {self._max_bytes} bytes; send less, or have the "
                "operator raise server.max_body_bytes.",
                headers={"Connection": "close"},
            )
