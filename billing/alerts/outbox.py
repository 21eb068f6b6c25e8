"""The outbox: messages wait in the database until they are delivered, at least once.

A message is posted as a CloudEvent, signed by the Standard Webhooks rules (webhook-id, -timestamp
and -signature; HMAC-SHA256 over `id.timestamp.body`). A receiver drops repeated ids. Retries begin
after 10 s and double up to an hour, for three days. Called off the event loop, by one thread.
"""

import base64
import hashlib
import hmac
import logging
import urllib.request
from collections.abc import Iterable
from datetime import UTC, datetime

import orjson

from billing.alerts.budgets import BudgetAlert
from billing.errors import ReceiverError
from billing.outgoing import send
from billing.prices.book import NS
from billing.store import alerts as rows
from billing.store.store import LedgerStore

log = logging.getLogger(__name__)

FIRST_RETRY_NS = 10 * NS
LAST_RETRY_NS = 3600 * NS
TRIED_NS = 3 * 86_400 * NS
KEPT_NS = 90 * 86_400 * NS  # for delivered messages; longer than any budget period
NEVER_NS = 2**63 - 1
AT_ONCE = 20
POST_TIMEOUT_S = 10.0
MOST_BYTES = 1024  # of an answer


class Outbox:
    """Stores alerts and delivers the due ones to one URL."""

    def __init__(self, store: LedgerStore, url: str, secret: bytes, *, source: str) -> None:
        self._store = store
        self._url = url
        self._secret = secret
        self._source = source

    def take(self, alerts: Iterable[BudgetAlert], now_ns: int) -> int:
        """Stores new alerts. Returns their number."""
        return keep(self._store, alerts, now_ns, source=self._source)

    def deliver(self, now_ns: int) -> int:
        """Posts due messages. Returns the number accepted."""
        with self._store.reading() as connection:
            due = rows.due_messages(connection, now_ns, AT_ONCE)
        taken = 0
        for message in due:
            error = self._post(message["id"], message["body"], now_ns)
            attempts = message["attempts"] + 1
            changes: dict[str, int] = {"attempts": attempts}
            if error is None:
                changes["delivered_ns"] = now_ns
                taken += 1
            else:
                next_ns = self._next_ns(message["id"], message["at_ns"], attempts, now_ns)
                changes["next_ns"] = next_ns
                log.warning("alert %s was not taken by %s: %s", message["id"], self._host, error)
            self._change(message["id"], changes)
            if error is not None:
                break  # the receiver may be down, and each try waits for it
        if due:
            self._store.retrying(lambda open_: rows.forget_messages(open_, now_ns - KEPT_NS))
        return taken

    def _change(self, name: str, changes: dict[str, int]) -> None:
        self._store.retrying(lambda open_: rows.change_message(open_, name, **changes))

    def _next_ns(self, name: str, at_ns: int, attempts: int, now_ns: int) -> int:
        if now_ns - at_ns > TRIED_NS:
            log.error("alert %s was not taken in three days, and is not sent again", name)
            return NEVER_NS
        return now_ns + min(LAST_RETRY_NS, FIRST_RETRY_NS << min(attempts - 1, 20))

    @property
    def _host(self) -> str:
        return urllib.request.Request(self._url).host or ""  # noqa: S310  for the log only

    def _post(self, name: str, body: str, now_ns: int) -> str | None:
        """None if it was accepted, else the reason."""
        headers = {
            "content-type": "application/cloudevents+json",
            **signature(self._secret, name, now_ns // NS, body),
        }
        request = urllib.request.Request(  # noqa: S310  the setting takes http(s) only
            self._url, body.encode(), headers, method="POST"
        )
        try:
            send(request, timeout_s=POST_TIMEOUT_S, most_bytes=MOST_BYTES)
        except ReceiverError as error:
            return str(error)
        return None


def keep(store: LedgerStore, alerts: Iterable[BudgetAlert], now_ns: int, *, source: str) -> int:
    """Stores new alerts for a server to deliver. Returns their number."""
    messages = [
        {
            "id": alert.id,
            "at_ns": now_ns,
            "body": _event(alert, now_ns, source),
            "attempts": 0,
            "next_ns": now_ns,
            "delivered_ns": None,
        }
        for alert in alerts
    ]
    if not messages:
        return 0
    return len(store.retrying(lambda open_: rows.add_messages(store, open_, messages)))


def _event(alert: BudgetAlert, now_ns: int, source: str) -> str:
    event = {
        "specversion": "1.0",
        "id": alert.id,
        "source": source,
        "type": alert.type,
        "time": datetime.fromtimestamp(now_ns // NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "subject": alert.data["tenant"],
        "datacontenttype": "application/json",
        "data": alert.data,
    }
    return orjson.dumps(event).decode()


def signature(secret: bytes, name: str, at_s: int, body: str) -> dict[str, str]:
    """The headers of Standard Webhooks 1.0."""
    text = f"{name}.{at_s}.{body}".encode()
    made = base64.b64encode(hmac.new(secret, text, hashlib.sha256).digest()).decode()
    return {
        "webhook-id": name,
        "webhook-timestamp": str(at_s),
        "webhook-signature": f"v1,{made}",
    }
