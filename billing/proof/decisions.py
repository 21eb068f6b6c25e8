"""Proves decisions by persons: each deposit, withdrawal and correction has its decision in the
admin trail, and each decision its entry.

If one of the two is missing, somebody has changed the database.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from billing.gate.entries import Entry, Kind
from billing.gate.work import SYSTEM
from billing.money import parse_units
from billing.proof.result import Problem
from billing.store import trail as store_trail
from billing.store.store import Connection

_PREFIX = "balance."


class _Decision(NamedTuple):
    """What a decision and its entry both say."""

    kind: str
    actor: str
    reason: str
    time: int
    amount: int
    reference: str
    expiry: int | None


class Decisions:
    """The persons' decisions recorded in entries, by `tenant/number`."""

    def __init__(self) -> None:
        self.booked: dict[str, _Decision] = {}

    def take(self, entry: Entry, details: dict[str, Any]) -> None:
        decided_by = details.get("by", SYSTEM)
        is_deposit = entry.kind not in (Kind.CHARGE, Kind.CORRECTION, Kind.EXPIRY)
        if is_deposit or decided_by != SYSTEM:
            what = f"{_PREFIX}{entry.kind}"
            why = details.get("reason", "")
            about = (entry.amount, entry.request_id, details.get("expires_ns"))
            decision = _Decision(what, decided_by, why, entry.at_ns, *about)
            self.booked[f"{entry.tenant}/{entry.seq}"] = decision


def check_decisions(connection: Connection, decisions: Decisions) -> Iterator[Problem]:
    """Entries without a decision or with another one, and decisions that were never booked."""
    left = dict(decisions.booked)
    for row in store_trail.trail_rows(connection):
        if not row["action"].startswith(_PREFIX):
            continue
        seq = row["seq"]
        booked = left.pop(row["subject"], None)
        if booked is None:
            message = f"{row['action']} of {row['subject']} was decided, but no entry books it"
            yield Problem(f"trail entry {seq}", 0, "decided", message)
        elif booked != (decided := _decision(row)):
            pairs = zip(_Decision._fields, booked, decided, strict=True)
            differing = next(name for name, found, said in pairs if found != said)
            message = f"its {differing} differs from trail entry {seq}"
            yield _problem(row["subject"], message)
    for subject in left:
        yield _problem(subject, "it has no decision in the admin trail")


def _decision(row: Any) -> _Decision:
    """The decision in a row of the trail."""
    before, after = (
        parse_units(orjson.loads(row[name])["balance"]) for name in ("before", "after")
    )
    said = orjson.loads(row["after"])
    about = (said["reference"], said.get("expires_ns"))
    return _Decision(
        row["action"], row["actor"], row["reason"], row["at_ns"], after - before, *about
    )


def _problem(subject: str, message: str) -> Problem:
    tenant, _, seq = subject.rpartition("/")
    return Problem(tenant, int(seq), "decided", message)
