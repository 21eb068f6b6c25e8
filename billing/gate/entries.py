"""Ledger entries: balanced, immutable, chained by hash. Pure values in the format that `verify`
proves.

An entry moves money between the accounts of one tenant. Each posting is the amount added to an
account, with credits positive. The postings of an entry sum to zero (double entry). The tenant's
balance is `granted + topup + receivable`; the other three accounts are the operator's side.

    granted     promotional money, spent before paid money  cash       where top-ups came from
    topup       money paid in advance                       promotion  where grants came from
    receivable  zero or less: what the tenant owes           revenue    what was earned

The hash of an entry is `sha256(hash before + json([tenant, seq, kind, request_id, at_ns, currency,
postings, body]))`; the first follows `genesis(tenant)`. Amounts in a body are units, as texts.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from billing.money import format_units

TENANT_ACCOUNTS = ("granted", "topup", "receivable")
ACCOUNTS = (*TENANT_ACCOUNTS, "revenue", "cash", "promotion")
AMOUNTS = {"saved", "fees", "held"}  # in a body, whole units as texts


class Kind(StrEnum):
    """The purpose of an entry; unique together with tenant and request id."""

    CHARGE = "charge"  # one per settled request, even if it is zero
    GRANT = "grant"
    TOPUP = "topup"
    CORRECTION = "correction"  # refunds a charge, to which it refers
    WITHDRAWAL = "withdrawal"  # paid money paid out again
    CHARGEBACK = "chargeback"  # a payment reversed by the payer's bank
    ADJUSTMENT = "adjustment"  # corrects a deposit, to which it refers
    EXPIRY = "expiry"  # removes the rest of an expired grant, to which it refers


CORRECTABLE = (Kind.CHARGE, Kind.GRANT, Kind.TOPUP)
CORRECTING = (Kind.CORRECTION, Kind.ADJUSTMENT, Kind.EXPIRY)  # name the entry in `corrects`


Postings = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. `request_id` is the request's, or the reference of a deposit or correction."""

    tenant: str
    seq: int  # per tenant, from 1, without gaps
    kind: Kind
    request_id: str
    at_ns: int  # never earlier than the previous entry's
    currency: str
    postings: str  # "topup:-8 revenue:8", in the order of ACCOUNTS, zeros left out
    body: str  # canonical JSON
    hash: bytes
    billed_ns: int | None = None  # indexed copy from the body; None means `at_ns`

    @property
    def moment_ns(self) -> int:
        """The instant that decides its day and month; for a charge, the admission."""
        return self.at_ns if self.billed_ns is None else self.billed_ns

    @property
    def amounts(self) -> dict[str, int]:
        return parse_postings(self.postings)

    @property
    def amount(self) -> int:
        """The tenant's gain; negative for a charge."""
        return sum(units for name, units in self.amounts.items() if name in TENANT_ACCOUNTS)

    @property
    def details(self) -> dict[str, Any]:
        details: dict[str, Any] = orjson.loads(self.body)
        return details

    @property
    def stated(self) -> dict[str, Any]:
        """The details for people and other programs: amounts are decimals of the currency."""
        details = self.details
        for name in AMOUNTS & details.keys():
            details[name] = format_units(int(details[name]))
        return details


def genesis(tenant: str) -> bytes:
    """The hash before a tenant's first entry."""
    return hashlib.sha256(b"cachesvc.ledger.v1\0" + tenant.encode()).digest()


def format_postings(postings: Postings) -> str:
    """Canonical text of balanced postings."""
    assert sum(postings.values()) == 0, f"postings do not balance: {dict(postings)}"
    return " ".join(f"{name}:{postings[name]}" for name in ACCOUNTS if postings.get(name))


def parse_postings(text: str) -> dict[str, int]:
    """The postings in a text. Raises `ValueError` for an unknown account or a nonzero sum."""
    postings: dict[str, int] = {}
    for part in text.split():
        name, _, units = part.partition(":")
        if name not in ACCOUNTS or name in postings:
            raise ValueError(f"postings {text!r} name the account {name!r} wrongly")
        postings[name] = int(units)
    if sum(postings.values()):
        raise ValueError(f"postings {text!r} do not sum to zero")
    return postings


def canonical(body: Mapping[str, Any]) -> str:
    """JSON with sorted keys and without empty values, the same on every machine."""
    kept = {name: value for name, value in body.items() if value not in (None, "", {}, False)}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS).decode()


def digest(
    before: bytes,
    tenant: str,
    seq: int,
    kind: str,
    request_id: str,
    at_ns: int,
    currency: str,
    postings: str,
    body: str,
) -> bytes:
    """The hash of an entry that follows the one with hash `before`."""
    fields = orjson.dumps([tenant, seq, kind, request_id, at_ns, currency, postings, body])
    return hashlib.sha256(before + fields).digest()
