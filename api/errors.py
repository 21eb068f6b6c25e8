"""The one table from an exception to what a client sees: status, type, code and body.

The wire's own refusals are the `ApiError`s below; `InvalidRequest` has a field that is wrong.
Every body has OpenAI's shape, `{"error": {message, type, param, code}}`, routes that do not exist
included. HTTP status codes appear here and nowhere else. Exceptions of the packages below are
looked up by their class, nearest ancestor first; one that is not in the table is a bug, answered
with a plain 500 that tells nothing of the inside, and logged whole.
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from starlette.exceptions import HTTPException

from billing import errors as billing_errors
from billing.money import format_units
from billing.prices.book import NS
from engine import errors as engine_errors
from tiers import errors as tier_errors

logger = logging.getLogger(__name__)

HELD_RETRY_S = 1  # when a running request ends is not known
_KINDS: Final = {402: "insufficient_quota", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class Row:
    """What clients see of one class of errors."""

    status: int
    code: str | None = None
    retry_after_s: int | None = None
    public: str | None = None  # instead of the error's own words, which tell of the inside
    kind: str = ""  # unless the status tells

    @property
    def type(self) -> str:
        other = "invalid_request_error" if self.status < 500 else "server_error"
        return self.kind or _KINDS.get(self.status, other)


TABLE: Final[dict[type[Exception], Row]] = {}


class ApiError(Exception):
    """A refusal that the wire itself decides on. The message says what was wrong and what to do."""

    def __init__(
        self, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.headers = dict(headers or {})

    def __init_subclass__(cls, *, status: int, code: str, retry_after_s: int | None = None) -> None:
        TABLE[cls] = Row(status, code, retry_after_s)


class InvalidRequest(ApiError, status=400, code="invalid_value"):
    """A field of the request is wrong."""


class NotJson(InvalidRequest, status=400, code="invalid_json"):
    """The body is not a JSON object."""


class ContextLengthExceeded(InvalidRequest, status=400, code="context_length_exceeded"):
    """Prompt and completion together exceed the model's context."""


class Unsupported(InvalidRequest, status=400, code="unsupported_parameter"):
    """The request uses a feature that this server or model cannot serve."""


class BodyTooLarge(ApiError, status=413, code="request_too_large"):
    """The body exceeds the configured limit."""


class BodyEncoded(ApiError, status=415, code="unsupported_encoding"):
    """The body is compressed."""


class ModelNotFound(ApiError, status=404, code="model_not_found"):
    """No model of that name is served here."""


class NotServed(ApiError, status=404, code="not_served"):
    """The route is one of other servers, and this one does not have it."""


class CacheNotKept(ApiError, status=409, code="cache_not_kept"):
    """The cache cannot be kept: it is too short, or its owner has reached the limit."""


class CacheNotPaid(ApiError, status=402, code="insufficient_balance"):
    """The balance does not cover the cache's first hour."""


class RecordNotFound(ApiError, status=404, code="not_found"):
    """Nothing of that name: the path tells what was looked for."""


class MissingKey(ApiError, status=401, code="missing_api_key"):
    """The route needs an API key, and the request has none."""


class LoginNeeded(ApiError, status=401, code="login_needed"):
    """The admin route needs a login or an admin key."""


class CsrfFailed(ApiError, status=403, code="csrf_failed"):
    """The request changes something and lacks the page's CSRF token."""


class ForeignPage(ApiError, status=403, code="foreign_page"):
    """A page of another site called a server that needs no key."""


class MissingScope(ApiError, status=403, code="insufficient_scope"):
    """The API key is valid but lacks the scope for this."""


class RateLimited(ApiError, status=429, code="rate_limit_exceeded"):
    """The key or tenant has reached a limit; `headers` say when to retry."""


class Overloaded(ApiError, status=503, code="overloaded", retry_after_s=1):
    """A pool shared between tenants is full."""


class QueueTooLong(Overloaded, status=503, code="queue_too_long"):
    """The request would wait too long; `headers` say when to retry."""


class GenerationFailed(ApiError, status=500, code="generation_failed"):
    """The engine ended the request with an error."""


def _not_now(code: str, why: str) -> Row:
    return Row(503, code, 5, public=f"{why} Try again shortly.")


_INVALID, _NOT_FOUND = Row(400, "invalid_value"), Row(404, "not_found")

TABLE.update(
    {
        engine_errors.RequestError: _INVALID,
        engine_errors.PromptTooLong: Row(400, "context_length_exceeded"),
        engine_errors.EmptyPrompt: Row(400, "empty_prompt"),
        engine_errors.InvalidParameter: _INVALID,
        engine_errors.StructureUnavailable: Row(400, "unsupported_parameter"),
        engine_errors.UnknownAdapter: Row(404, "model_not_found"),
        engine_errors.QueueFull: Row(503, "overloaded", 1),
        engine_errors.EngineClosed: Row(503, "shutting_down", 5),
        engine_errors.RemoteFault: Row(502, "engine_fault"),
        engine_errors.RemoteBusy: Row(429, "engine_overloaded", 1),
        engine_errors.RemoteAway: Row(503, "engine_unavailable", 5),
        engine_errors.RemoteSilent: Row(504, "engine_timeout"),
        engine_errors.EngineFailed: Row(500, "engine_failed"),
        billing_errors.UnknownKey: Row(401, "invalid_api_key"),
        billing_errors.KeyExpired: Row(401, "expired_api_key"),
        billing_errors.KeyRevoked: Row(401, "revoked_api_key"),
        billing_errors.TenantSuspended: Row(403, "tenant_suspended"),
        billing_errors.InsufficientBalance: Row(402, "insufficient_balance"),
        billing_errors.SpendLimitReached: Row(429, "spend_limit_reached", kind=_KINDS[402]),
        billing_errors.CurrencyMismatch: Row(403, "currency_mismatch"),
        billing_errors.UnknownTenant: Row(403, "unknown_tenant"),
        billing_errors.NoPrice: Row(403, "no_price"),
        billing_errors.InvalidAmount: _INVALID,
        billing_errors.InvalidLimit: _INVALID,
        billing_errors.InvalidName: _INVALID,
        billing_errors.InvalidSpan: _INVALID,
        billing_errors.PriceError: Row(400, "invalid_rate_card"),
        billing_errors.UnknownCard: _NOT_FOUND,
        billing_errors.UnknownHold: _NOT_FOUND,
        billing_errors.UnknownDeposit: _NOT_FOUND,
        billing_errors.UnknownRequest: _NOT_FOUND,
        billing_errors.UnknownBudget: _NOT_FOUND,
        billing_errors.CardConflict: Row(409, "rate_card_conflict"),
        billing_errors.AlreadyExists: Row(409, "already_exists"),
        billing_errors.DuplicateRequest: Row(409, "duplicate_request"),
        billing_errors.IdempotencyConflict: Row(409, "idempotency_key_reused"),
        billing_errors.IdempotencyBusy: Row(409, "idempotency_key_busy", 1),
        billing_errors.LedgerUnavailable: _not_now(
            "ledger_unavailable", "The ledger cannot be read or written now, so nothing is served."
        ),
        billing_errors.ClockJumped: _not_now(
            "ledger_unavailable",
            "The server's clock is wrong, so bills would be too, and nothing is served.",
        ),
        billing_errors.LedgerClosed: Row(503, "shutting_down", 5),
        tier_errors.NotSaved: _not_now(
            "not_saved", "The server's disk cannot be written now, so this change is not kept."
        ),
        tier_errors.PurgeFailed: Row(409, "purge_failed"),
    }
)

UNEXPECTED: Final = Row(500, "internal_error")
UNEXPECTED_MESSAGE: Final = (
    "The server failed while it handled this request; nothing was charged for an answer that did "
    "not come. Retry, and give the operator the X-Request-Id if it fails again."
)
ROUTE_CODES: Final[Mapping[int, str]] = {404: "not_found", 405: "method_not_allowed"}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as it goes out: `body` under the key "error", and headers that belong to it."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)  # more of the error, for programs

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            **self.about,
        }
        return {"error": error}


def answer_to(error: BaseException) -> ErrorAnswer:
    """The answer a client gets to `error`. Anything unknown is a 500 without its message."""
    if isinstance(error, HTTPException):  # starlette's own: a path or a method that does not exist
        own = Row(error.status_code, ROUTE_CODES.get(error.status_code))
        message = f"{error.detail}. See /openapi.json for the routes of this server."
        return ErrorAnswer(own.status, message, own.type, own.code, headers=error.headers or {})
    row = _row(error)
    if row is None:
        return ErrorAnswer(UNEXPECTED.status, UNEXPECTED_MESSAGE, UNEXPECTED.type, UNEXPECTED.code)
    headers = dict(getattr(error, "headers", {}))
    if (wait_s := getattr(error, "retry_after_s", None) or row.retry_after_s) is not None:
        headers.setdefault("Retry-After", str(wait_s))
    if row.status == 409 and row.retry_after_s is None:
        headers.setdefault("x-should-retry", "false")  # OpenAI's clients take a 409 for a lock
    if row.status == 401:
        headers.setdefault("WWW-Authenticate", "Bearer")
    about: Mapping[str, Any] = {}
    if isinstance(error, billing_errors.SpendLimitReached):
        headers |= _until(error, time.time())
        about = {"limit": _spend_limit(error)}
    return ErrorAnswer(
        row.status,
        row.public or str(error),
        row.type,
        row.code,
        getattr(error, "param", None),
        headers,
        about=about,
    )


def _until(error: billing_errors.SpendLimitReached, now_s: float) -> dict[str, str]:
    """When to retry: soon if running requests hold the rest, else when the limit ends.

    OpenAI's and Anthropic's clients respect `x-should-retry`; they ignore a wait of days.
    """
    if error.passes:
        return {"Retry-After": str(HELD_RETRY_S)}
    wait_s = max(1, math.ceil(error.ends_ns / NS - now_s))
    return {"Retry-After": str(wait_s), "x-should-retry": "false"}


def _spend_limit(error: billing_errors.SpendLimitReached) -> dict[str, Any]:
    """The limit, for programs; amounts are decimals of the currency."""
    ends = datetime.fromtimestamp(error.ends_ns // NS, UTC)
    return {
        "name": error.limit,
        "of": error.of,
        "value": error.value,
        "per": error.per,
        "currency": error.currency,
        "amount": format_units(error.amount),
        "spent": format_units(error.spent),
        "held": format_units(error.held),
        "needed": format_units(error.needed),
        "ends_at": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def ended_by(refusal: billing_errors.GateError) -> dict[str, Any]:
    """Why an answer that had begun was cut off: the code of the refusal, and a hard limit."""
    answer = answer_to(refusal)
    return {"ended_by": answer.code, **answer.about}


def log_untold(request_id: str, error: BaseException) -> None:
    """Logs what clients do not see: a bug's traceback, else the text behind `public`."""
    row = _row(error)
    if row is None and not isinstance(error, HTTPException):
        logger.error("request %s failed", request_id, exc_info=error)
    elif row is not None and row.public:
        logger.error("request %s failed: %s", request_id, error)


def _row(error: BaseException) -> Row | None:
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), None)
