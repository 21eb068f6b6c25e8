"""Rows of the ledger's hot tables as values and back. Pure; for statements of either kind.

Reads accept the driver's values: a wide number is text on SQLite and a decimal on PostgreSQL.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from billing.gate.entries import ACCOUNTS, CORRECTING, Entry, Kind
from billing.gate.holds import StoredHold
from billing.gate.limits import Checked, Spender, Spending, SpendLimit
from billing.gate.work import TenantAccount
from billing.usage import Usage

Row = Mapping[Any, Any]


def read_account(row: Row) -> TenantAccount:
    limit = row["credit_limit"]
    return TenantAccount(
        tenant=row["tenant"],
        currency=row["currency"],
        credit_limit=None if limit is None else int(limit),
        suspended=bool(row["suspended"]),
        head=bytes(row["head"]),
        seq=row["seq"],
        at_ns=row["at_ns"],
        held=int(row["held"]),
        balances={name: int(row[name]) for name in ACCOUNTS},
        limited=bool(row["limited"]),
    )


def read_hold(row: Row) -> StoredHold:
    return StoredHold(
        tenant=row["tenant"],
        request_id=row["request_id"],
        amount=int(row["amount"]),
        expires_ns=row["expires_ns"],
        owner=row["owner"],
        boot=row["boot"],
        body=row["body"],
        usage=Usage.from_record(orjson.loads(row["usage"])),
        checked=_read_checked(row["checked"]),
    )


def _read_checked(text: str) -> Checked | None:
    if not text:
        return None
    said = orjson.loads(text)
    return Checked(said["at"], said["limits"])


def read_entry(row: Row) -> Entry:
    return Entry(
        tenant=row["tenant"],
        seq=row["seq"],
        kind=Kind(row["kind"]),
        request_id=row["request_id"],
        at_ns=row["at_ns"],
        currency=row["currency"],
        postings=row["postings"],
        body=row["body"],
        hash=bytes(row["hash"]),
        billed_ns=row["billed_ns"],
    )


def entry_row(entry: Entry) -> dict[str, Any]:
    corrects = entry.details["corrects"] if entry.kind in CORRECTING else None
    return {
        "tenant": entry.tenant,
        "seq": entry.seq,
        "kind": entry.kind.value,
        "request_id": entry.request_id,
        "at_ns": entry.at_ns,
        "currency": entry.currency,
        "postings": entry.postings,
        "body": entry.body,
        "hash": entry.hash,
        "corrects": corrects,
        "billed_ns": entry.billed_ns,
    }


def hold_row(hold: StoredHold) -> dict[str, Any]:
    return {
        "tenant": hold.tenant,
        "request_id": hold.request_id,
        "amount": hold.amount,
        "expires_ns": hold.expires_ns,
        "owner": hold.owner,
        "boot": hold.boot,
        "body": hold.body,
        "usage": orjson.dumps(hold.usage.record()).decode(),
        "checked": "" if hold.checked is None else orjson.dumps(hold.checked).decode(),
    }


def read_limit(row: Row) -> SpendLimit:
    names = ("name", "tenant", "per", "of", "value", "since_ns", "version")
    return SpendLimit(amount=int(row["amount"]), **{name: row[name] for name in names})


def read_spending(row: Row) -> tuple[Spender, Spending]:
    spender = Spender(row["budget"], row["period"], row["value"])
    return spender, Spending(int(row["charged"]), int(row["held"]))


def spending_row(spender: Spender, spending: Spending) -> dict[str, Any]:
    return {
        "budget": spender.limit,
        "period": spender.period,
        "value": spender.value,
        "charged": spending.charged,
        "held": spending.held,
    }


def account_row(account: TenantAccount) -> dict[str, Any]:
    return {
        "of_tenant": account.tenant,
        "held": account.held,
        "seq": account.seq,
        "at_ns": account.at_ns,
        "head": account.head,
        **account.balances,
    }
