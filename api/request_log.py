"""The outermost middleware: request ids, uncaught errors, one log line and one count per request.

The id is the client's X-Request-Id if that is a valid name. Every answer carries it. Pure ASGI, so
that a stream passes through without a copy.
"""

import logging
import secrets
import time
from collections.abc import Callable

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
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
        status: int | None = None

        async def name(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ignored = ", ".join(log.facts.get("ignored_fields") or ()).encode()
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", (client_id or log.request_id).encode()),
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
            answer = answer_to(error)
            body = orjson.dumps(answer.body())
            await Response(body, answer.status, None, "application/json")(scope, receive, name)
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
    return secrets.token_hex(16)


def _client_id(scope: Scope) -> str | None:
    sent: str = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return sent if FIT_NAME.fullmatch(sent) else None
