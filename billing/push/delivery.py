"""Sends new entries to a metering service, and keeps refused events for another try.

The chains are the outbox, and an export's position says how far it has been sent. An event that is
refused for its content must not block the rest: it is stored with the reason, reported, and retried
by each later export. Called off the event loop, by one thread.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from billing.alerts.budgets import BudgetAlert
from billing.alerts.outbox import keep
from billing.errors import ExportError
from billing.gate.entries import Entry
from billing.push import post
from billing.push.events import HAS_IT, Format, HttpAnswer, HttpCall, PushEvent, batches
from billing.reports import export
from billing.store import push as rows
from billing.store import reports as store_reports
from billing.store.store import LedgerStore

ALL_REFUSED = 20  # refused in a row and none accepted: the service's setup is wrong, not the events
TRIED_AGAIN = 1_000  # refused events that one export retries
SHOWN = 20
Refused = dict[str, tuple[PushEvent, str]]  # by id, with the reason


@dataclass(slots=True)
class ExportResult:
    """The result of an export. `refused` has the reason by event; `unknown` are skipped tenants."""

    sent: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        shown = dict(list(self.refused.items())[:SHOWN])
        return {
            "entries": self.sent,
            "refused": len(self.refused),
            "why": shown,
            "unknown_tenants": self.unknown,
        }


def deliver(
    store: LedgerStore, name: str, to: Format, clock_ns: Callable[[], int] = time.time_ns
) -> ExportResult:
    """Sends every entry after the position of the export `name`.

    Raises `ExportError`; entries accepted until then are recorded.
    """
    sender = Sender(store, name, to, clock_ns)
    sender.try_again()
    with store.reading() as connection:
        accounts = store_reports.all_accounts(connection)
    sender.done.unknown = [each for each in accounts if accounts[each].seq and not to.knows(each)]
    skipped = sender.done.unknown
    try:
        sender.done.sent = export.drain(store, name, sender.take, chunk=to.batch, skipped=skipped)
    finally:
        sender.alarm()
    return sender.done


class Sender:
    """One run of an export."""

    def __init__(
        self, store: LedgerStore, name: str, to: Format, clock_ns: Callable[[], int]
    ) -> None:
        self._store, self._name, self._to = store, name, to
        self._clock_ns = clock_ns
        self._token = ""
        self._any_taken = False
        self._tenants: dict[str, str] = {}  # of refused events
        self.done = ExportResult()

    def take(self, entries: Iterable[Entry]) -> None:
        """Sends the entries' events. Returns once each was accepted or stored as refused."""
        events = (event for entry in entries for event in self._to.events(entry))
        for batch in batches(events, self._to.batch):
            refused = self._send(batch)
            self._check_that_some_are_taken(refused)
            self._note(refused)

    def _check_that_some_are_taken(self, refused: Refused) -> None:
        if self._any_taken or len(self.done.refused.keys() | refused.keys()) < ALL_REFUSED:
            return
        event, why = next(reversed(refused.values()))
        raise ExportError(
            f"{self._to.url} refused the first {ALL_REFUSED} events, the last of them {event.id}: "
            f"{why}; nothing more is sent until one is taken"
        )

    def try_again(self) -> None:
        """Retries events refused by earlier exports."""
        with self._store.reading() as connection:
            kept = rows.refused_rows(connection, self._name, TRIED_AGAIN)
            found = [event for row in kept for event in self._again(connection, row)]
        for batch in batches(found, self._to.batch):
            refused = self._send(batch)
            taken = [event.id for event in batch if event.id not in refused]
            self._store.retrying(
                lambda open_, taken=taken: rows.drop_refused(open_, self._name, taken)  # type: ignore[misc]
            )
            self._note(refused)

    def alarm(self) -> None:
        """Reports refused events once a day; a server with `billing.alerts_to` delivers the
        alert."""
        if not self.done.refused:
            return
        now_ns = self._clock_ns()
        day = datetime.fromtimestamp(now_ns // 10**9, UTC).strftime("%Y-%m-%d")
        event, why = next(iter(self.done.refused.items()))
        data = {
            "tenant": self._tenants[event],
            "export": self._name,
            "receiver": self._to.url,
            "refused": len(self.done.refused),
            "first": {"event": event, "why": why},
        }
        alert = BudgetAlert(f"export/{self._name}/{day}", "cachesvc.export.refused.v1", data)
        keep(self._store, [alert], now_ns, source="cachesvc")

    def _again(self, connection: Any, row: Any) -> Iterator[PushEvent]:
        tenant, seq = row["tenant"], row["seq"]
        if not self._to.knows(tenant):
            return
        for entry in store_reports.stream_entries(connection, tenant, after=seq - 1, until=seq):
            yield from (event for event in self._to.events(entry) if event.id == row["event"])

    def _note(self, refused: Refused) -> None:
        if not refused:
            return
        self.done.refused |= {name: why for name, (_, why) in refused.items()}
        self._tenants |= {name: event.tenant for name, (event, _) in refused.items()}
        kept = [
            {
                "name": self._name,
                "event": event.id,
                "tenant": event.tenant,
                "seq": event.entry,
                "at_ns": self._clock_ns(),
                "error": why,
            }
            for event, why in refused.values()
        ]
        self._store.retrying(lambda open_: rows.put_refused(self._store, open_, kept))

    def _send(self, events: Sequence[PushEvent]) -> Refused:
        """Sends events. Returns the refused ones by id, with the reason."""
        answer = self._ask(events)
        if answer.status < 300:
            self._any_taken = True
            return {}
        faults = self._to.faults(answer, events)
        if faults is None and len(events) == 1:
            faults = {0: answer.said}
        if faults is None:  # unknown which
            return {name: each for event in events for name, each in self._send([event]).items()}
        if HAS_IT in faults.values():
            self._any_taken = True
        refused = {events[at].id: (events[at], why) for at, why in faults.items() if why != HAS_IT}
        rest = [event for at, event in enumerate(events) if at not in faults]
        return refused | self._send(rest) if rest else refused

    def _ask(self, events: Sequence[PushEvent]) -> HttpAnswer:
        session = self._to.session()
        if session is not None and not self._token:
            self._token = self._new_token(session)
        try:
            return post.ask(self._to.call(events, self._token))
        except post.Unauthorised:
            if session is None or not self._token:
                raise
            self._token = self._new_token(session)  # the previous one has expired
            return post.ask(self._to.call(events, self._token))

    def _new_token(self, session: HttpCall) -> str:
        answer = post.ask(session)
        try:
            return str(orjson.loads(answer.body)["authentication_token"])
        except (ValueError, KeyError, TypeError):
            raise ExportError(f"{session.url} gave no token: {answer.said}") from None
