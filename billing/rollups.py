"""Sums of charges by day and by session, kept beside the ledger so that a statement reads few rows.

Pure: the store adds these rows in the transaction of their entries, the audit makes them again.
Days are UTC. Corrections are few and stay out of the sums; a statement lists them.
"""

from collections.abc import Iterable
from typing import Any

from billing.entries import Entry, Kind
from billing.usage import CLASSES

SPLIT = 10**9
DAY_NS = 86_400 * 10**9

Row = dict[str, Any]


def daily_rows(entries: Iterable[Entry]) -> list[Row]:
    """One row for each day, project, key, model and rate among the charges."""
    rows: dict[tuple[Any, ...], Row] = {}
    for entry in entries:
        if entry.kind is not Kind.CHARGE:
            continue
        details = entry.details
        key = {
            "tenant": entry.tenant,
            "day": entry.at_ns // DAY_NS,
            "project": details.get("project", ""),
            "key_id": details.get("key", ""),
            "model": details["model"],
            "card": details["card"],
            "version": details["version"],
            "window_name": details["window"],
        }
        add_charge(rows.setdefault(tuple(key.values()), key | zeros()), entry, details)
    return [carried(rows[key]) for key in sorted(rows)]


def session_rows(entries: Iterable[Entry]) -> list[Row]:
    """One row for each session that is named among the charges."""
    rows: dict[tuple[str, str], Row] = {}
    for entry in entries:
        if entry.kind is not Kind.CHARGE or '"session":' not in entry.body:
            continue
        details = entry.details
        key = {"tenant": entry.tenant, "session": details["session"]}
        row = rows.setdefault((entry.tenant, details["session"]), key | zeros())
        row["last_ns"] = entry.at_ns
        add_charge(row, entry, details)
    return [carried(rows[key]) for key in sorted(rows)]


def zeros() -> Row:
    return dict.fromkeys(("requests", *CLASSES, "amount", "saved"), 0)


def add_charge(row: Row, entry: Entry, details: dict[str, Any]) -> None:
    row["requests"] += 1
    for name, count in details.get("usage", {}).items():
        row[name] += count
    row["amount"] -= entry.amount
    row["saved"] += int(details.get("saved", "0"))


def carried(row: Row) -> Row:
    """The row as stored: amounts in two parts that can be added in SQL without overflow."""
    stored = {name: value for name, value in row.items() if name not in ("amount", "saved")}
    for name in ("amount", "saved"):
        stored[f"{name}_hi"], stored[f"{name}_lo"] = divmod(row[name], SPLIT)
    return stored


def joined(stored: Row) -> Row:
    """The row with its amounts whole again; the inverse of `carried`."""
    row = {k: v for k, v in stored.items() if not k.endswith(("_hi", "_lo"))}
    for name in ("amount", "saved"):
        row[name] = stored[f"{name}_hi"] * SPLIT + stored[f"{name}_lo"]
    return row
