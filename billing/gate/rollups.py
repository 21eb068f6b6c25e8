"""Sums of charges by day and by session, stored with the ledger so that a statement reads few rows.

Pure: the store adds these rows in the transaction of their entries, and the audit recomputes them.
Days are UTC. Corrections are few and not in the sums; a statement lists them. `granted` is the part
of the amount taken from granted money, and `owed` the part that became debt.
"""

from collections.abc import Iterable
from typing import Any

from billing.gate.entries import Entry, Kind
from billing.usage import CLASSES

SPLIT = 10**9  # amounts are stored as hi * SPLIT + lo, so that SQL adds them without overflow
DAY_NS = 86_400 * 10**9
DAILY_KEY = ("tenant", "day", "project", "key_id", "model", "card", "version", "window_name")
SESSION_KEY = ("tenant", "session")
STORED = ({"storage_token_hours"}, {"storage_token_minutes"})
AMOUNTS = ("amount", "saved", "fees", "granted", "owed")
COUNTERS = (
    "requests",
    *CLASSES,
    *(f"{name}_{part}" for name in AMOUNTS for part in ("hi", "lo")),
)

Row = dict[str, Any]


class Rollups:
    """Collects charges into daily and session rows."""

    def __init__(self) -> None:
        self._daily: dict[tuple[Any, ...], Row] = {}
        self._sessions: dict[tuple[Any, ...], Row] = {}

    def add(self, entry: Entry, details: dict[str, Any]) -> None:
        key = (
            entry.tenant,
            entry.moment_ns // DAY_NS,
            details.get("project", ""),
            details.get("key", ""),
            details["model"],
            details["card"],
            details["version"],
            details["window"],
        )
        taken = entry.amounts
        _add(_row(self._daily, DAILY_KEY, key), taken, details)
        session = details.get("session")
        if session:
            row = _row(self._sessions, SESSION_KEY, (entry.tenant, session))
            row["last_ns"] = max(row.get("last_ns", 0), entry.moment_ns)
            _add(row, taken, details)

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Daily and session rows in the order of their keys, amounts whole."""
        return _sorted(self._daily), _sorted(self._sessions)

    def stored(self) -> tuple[list[Row], list[Row]]:
        """The rows as stored."""
        daily, sessions = self.rows()
        return list(map(carried, daily)), list(map(carried, sessions))


def charge_row(entry: Entry) -> Row:
    """The counters of one charge, without a key."""
    row: Row = dict.fromkeys(("requests", *CLASSES, *AMOUNTS), 0)
    _add(row, entry.amounts, entry.details)
    return row


def rollups(entries: Iterable[Entry]) -> Rollups:
    """The sums of the charges among these entries."""
    sums = Rollups()
    for entry in entries:
        if entry.kind is Kind.CHARGE:
            sums.add(entry, entry.details)
    return sums


def _row(rows: dict[tuple[Any, ...], Row], names: tuple[str, ...], key: tuple[Any, ...]) -> Row:
    row = rows.get(key)
    if row is None:
        row = rows[key] = dict(zip(names, key, strict=True))
        row.update(dict.fromkeys(("requests", *CLASSES, *AMOUNTS), 0))
    return row


def _sorted(rows: dict[tuple[Any, ...], Row]) -> list[Row]:
    return [rows[key] for key in sorted(rows)]


def _add(row: Row, taken: dict[str, int], details: dict[str, Any]) -> None:
    usage = details.get("usage", {})
    row["requests"] += set(usage) not in STORED  # an hour of a pin is not a request
    for name, count in usage.items():
        row[name] += count
    row["amount"] += taken.get("revenue", 0)
    row["granted"] -= taken.get("granted", 0)
    row["owed"] -= taken.get("receivable", 0)
    row["saved"] += int(details["saved"])
    row["fees"] += int(details.get("fees", 0))


def carried(row: Row) -> Row:
    """The row as stored: amounts in two parts that can be added in SQL without overflow."""
    stored = {name: value for name, value in row.items() if name not in AMOUNTS}
    for name in AMOUNTS:
        stored[f"{name}_hi"], stored[f"{name}_lo"] = divmod(row[name], SPLIT)
    return stored


def joined(stored: Row) -> Row:
    """The row with its amounts whole again; the inverse of `carried`."""
    row = {k: v for k, v in stored.items() if not k.endswith(("_hi", "_lo"))}
    for name in AMOUNTS:
        row[name] = stored[f"{name}_hi"] * SPLIT + stored[f"{name}_lo"]
    return row
