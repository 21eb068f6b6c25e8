"""The outermost middleware: request ids, uncaught errors, one log line and one count per request.

The id is the client's X-Request-Id if that is a valid name. Every answer carries it. Pure ASGI, so
that a stream passes through without a copy.
"""

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.context import RequestLog
from api.errors import answer_to
from api.headers import FIT_NAME
from billing.gate.outcomes import Outcome

logger = logging.getLogger(__name__)
request_logger = structlog.get_logger("api.request")

CLIENT_GONE = 499  # nginx' code for a client that left before the answer
QUIET = frozenset({"/health", "/health/ready", "/metrics"})  # polled every few seconds


class RequestLogger:
    """Opens a `RequestLog` for each HTTP request and logs it when its response has ended.

    `observe` is told the path, the status and the seconds of each.
    """

    def __init__(self, app: ASGIApp, observe: Callable[[str, int, float], None]) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        log = RequestLog(request_id())
        client_id = _client_id(scope)
        log.add(method=scope["method"], path=scope["path"], client_request_id=client_id)
        scope.setdefault("state", {})["request_log"] = log
        shown_id = client_id or log.request_id
        status: int | None = None

        async def name(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ignored = ", ".join(log.facts.get("ignored_fields") or ()).encode()
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", shown_id.encode()),
                    *([(b"x-cachesvc-ignored", ignored)] if ignored else ()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, name)
        except ClientDisconnect:
            log.add(outcome=str(Outcome.CLIENT_GONE))
        except Exception as error:
            logger.exception("request %s failed", log.request_id)
            log.add(error=type(error).__name__)
            if status is not None:
                raise
            await _send_unexpected(name, error)
        finally:
            self._write(log, status)

    def _write(self, log: RequestLog, status: int | None) -> None:
        """`status` is None if nothing was sent because the client had disconnected."""
        path, took_ns = log.facts["path"], time.monotonic_ns() - log.arrival_ns
        self._observe(path, status or CLIENT_GONE, took_ns / 1e9)
        if path in QUIET and status == 200:
            return
        request_logger.info(
            "request",
            request_id=log.request_id,
            status=status,
            duration_ms=round(took_ns / 1e6, 3),
            **{name: fact for name, fact in log.facts.items() if fact is not None},
        )


def request_id() -> str:
    """A new id: 128 random bits as 32 hex digits. Ids are unique in the ledger."""
    return uuid.uuid4().hex


def _client_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if FIT_NAME.fullmatch(text) else None
    return None


async def _send_unexpected(send: Any, error: Exception) -> None:
    answer = answer_to(error)
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send(
        {"type": "http.response.body", "body": orjson.dumps(answer.body()), "more_body": False}
    )
