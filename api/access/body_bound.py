"""The bound on request bodies, for every route and whoever reads it: ours, or the framework's.

FastAPI reads the body of an admin route before any of its dependencies asks who sent it, so the
bound stands before both. Pure ASGI; a body within it passes through without a copy.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import BodyTooLarge


class BodyBound:
    """Ends a body larger than `max_bytes` as soon as that is known, by BodyTooLarge."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        expected = int(declared) if declared.isdigit() else 0
        received = 0

        async def bounded() -> Message:
            nonlocal received
            self._check(expected)
            message = await receive()
            received += len(message.get("body", b""))
            self._check(received)
            return message

        await self._app(scope, bounded, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise BodyTooLarge(
                f"The body is larger than {self._max_bytes} bytes; send less, or have the "
                "operator raise server.max_body_bytes.",
                headers={"Connection": "close"},
            )
