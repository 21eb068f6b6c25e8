"""HTTP to a metering service, with retries as the service asks. Blocks."""

import time
import urllib.request
from email.message import Message

from billing import outgoing
from billing.errors import ExportError, ReceiverError
from billing.push.events import HttpAnswer, HttpCall

SILENCE_S = 30.0
WHOLE_S = 300.0  # of a call: a list may be long
TRIES = 4
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
MOST_BYTES = 64 << 20  # of an answer
PASSING = (408, 409, 425, 429, 500, 502, 503, 504)
UNAUTHORISED = 401
OF_EVENTS = (400, 413, 422)  # the content was refused; other statuses concern every call


class Unauthorised(ExportError):
    """The key or the token is not accepted, or no longer."""


def ask(call: HttpCall) -> HttpAnswer:
    """The answer to a call: accepted (2xx), or refused for its content (`OF_EVENTS`).

    Raises `ExportError` if the service is unreachable or refuses our credentials.
    """
    wait_s = FIRST_WAIT_S
    for left in reversed(range(TRIES)):
        try:
            reply = _once(call)
        except ReceiverError as error:
            if not left:
                raise _away(call, str(error)) from error
        else:
            answer = HttpAnswer(reply.status, reply.body)
            retry = _asks_for_retry(reply.status, reply.headers)
            if not reply.refusal or (reply.status in OF_EVENTS and not retry):
                return answer
            if reply.status == UNAUTHORISED:
                raise Unauthorised(str(_away(call, answer.said)))
            if not left or not retry:
                raise _away(call, reply.refusal if reply.redirects else answer.said)
            wait_s = max(wait_s, _retry_after_s(reply.headers))
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise AssertionError("the last try returns or raises")


def _once(call: HttpCall) -> outgoing.ReceiverReply:
    headers = {"accept": "application/json", **call.headers}
    request = urllib.request.Request(call.url, call.data, headers)  # noqa: S310  http(s) only
    return outgoing.ask(request, silence_s=SILENCE_S, timeout_s=WHOLE_S, most_bytes=MOST_BYTES)


def _asks_for_retry(status: int, headers: Message) -> bool:
    """Stripe has its own header for this; the others use the status."""
    said = headers.get("stripe-should-retry", "")
    return said == "true" or (said != "false" and status in PASSING)


def _retry_after_s(headers: Message) -> float:
    text = headers.get("retry-after", "")
    return min(float(text), LONGEST_WAIT_S) if text.isdecimal() else 0.0


def _away(call: HttpCall, said: str) -> ExportError:
    if call.data is None:
        return ExportError(f"{call.url} cannot be read: {said}")
    return ExportError(
        f"{call.url} did not take the events: {said}; they are sent again by the next export"
    )
