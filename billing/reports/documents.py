"""Accounts, keys, cards, re-ratings, proofs, holds and entries as JSON documents. Pure.

One shape for the command line's `--json` and the admin routes. Amounts are exact decimal texts,
instants are nanoseconds since 1970, `None` is unlimited.
"""

from dataclasses import asdict
from decimal import Context, Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import orjson

from billing.gate.entries import Entry
from billing.gate.holds import StoredHold, decode_request
from billing.keys import KeyInfo, Scope
from billing.money import format_units, rate_per_million
from billing.prices.book import ABOVE, DAYS, NS, ModelPrice, RateCard, Rates
from billing.prices.cards import REFUSED
from billing.prices.lint import CardFinding
from billing.proof.result import Proof
from billing.tenants import Tenant
from billing.usage import HIT_CLASSES, RATE_OF, RELATIVE

if TYPE_CHECKING:
    from billing.proof.rerate import Difference, Plan

RATES = (*HIT_CLASSES, "miss", "output")  # that every card has
EXTRAS = tuple(name for name in RATE_OF.values() if name not in RATES)
FEES = ("request", "minimum")  # amounts of each request

Document = dict[str, Any]
_CONTEXT = Context(prec=80)


def tenant_document(tenant: Tenant) -> Document:
    available, limit = tenant.available, tenant.credit_limit
    return {
        "tenant": tenant.tenant,
        "currency": tenant.currency,
        "prepaid": tenant.prepaid,
        "credit_limit": None if limit is None else format_units(limit),
        "suspended": tenant.suspended,
        "granted": format_units(tenant.granted),
        "topped_up": format_units(tenant.topup),
        "owed": format_units(tenant.owed),
        "balance": format_units(tenant.balance),
        "held": format_units(tenant.held),
        "available": None if available is None else format_units(available),
        "entries": tenant.seq,
    }


def key_document(info: KeyInfo, now_ns: int) -> Document:
    """A key's data without the key itself."""
    return {
        "id": info.key_id,
        "prefix": info.prefix,
        "tenant": info.tenant,
        "project": info.project,
        "name": info.name,
        "scopes": [scope.value for scope in Scope if scope in info.scopes],
        "state": key_state(info, now_ns),
        "created_ns": info.created_ns,
        "expires_ns": info.expires_ns,
        "revoked_ns": info.revoked_ns,
    }


def key_state(info: KeyInfo, now_ns: int) -> str:
    if info.revoked_ns is not None:
        return "revoked"
    expired = info.expires_ns is not None and info.expires_ns <= now_ns
    return "expired" if expired else "valid"


def card_document(card: RateCard) -> Document:
    """A card. Prices are per million tokens; `-` means that the card has no such price."""
    return {
        "name": card.name,
        "version": card.version,
        "currency": card.currency,
        "valid_from_ns": card.valid_from_ns,
        "time_zone": card.zone.key,
        "minimum_cached_tokens": card.minimum_cached_tokens,
        "windows": [
            {
                "name": window.name,
                "start": window.start.isoformat("minutes"),
                "end": window.end.isoformat("minutes"),
                "days": [DAYS[day] for day in sorted(window.days)],
                "holidays": window.holidays.value,
            }
            for window in card.windows
        ],
        "holidays": [day.isoformat() for day in sorted(card.holidays)],
        "tenants": sorted(card.tenants),
        "valid_until_ns": card.valid_until_ns,
        "groups": [
            {
                "name": group.name,
                "tenants": sorted(group.tenants),
                "factor": _decimal(group.factor),
                "until_ns": group.until_ns,
            }
            for group in card.groups
        ],
        "services": {name: _decimal(factor) for name, factor in card.services.items()},
        "models": [
            {
                "match": price.pattern,
                "window": window,
                **{name: price_text(rates, name) for name in (*RATES, *EXTRAS)},
                **{name: format_units(getattr(rates, name)) for name in FEES},
            }
            for price in card.models
            for window, rates in _priced(price)
        ],
    }


def _priced(price: ModelPrice) -> list[tuple[str, Rates]]:
    """A model's rates by window and by exceeded prompt length."""
    by_length = [(f"{ABOVE}{length}", rates) for length, rates in sorted(price.above.items())]
    return [*price.rates.items(), *by_length]


def _decimal(factor: Fraction) -> str:
    """A factor as a decimal, which is exact because it was read from one."""
    return str(_CONTEXT.divide(Decimal(factor.numerator), Decimal(factor.denominator)))


def price_text(rates: Rates, name: str) -> str:
    units = getattr(rates, name)
    if name == "unreported" and units is None:
        return REFUSED
    if name in RELATIVE:  # shown as on the card; stored as the difference
        units = getattr(rates, RELATIVE[name]) + units if units else None
    return "-" if units is None else rate_per_million(units)


def finding_document(finding: CardFinding) -> Document:
    return asdict(finding) | {"level": finding.level.value}


def plan_document(plan: "Plan") -> Document:
    """A plan. `unpriced` requests have no price; charges in other currencies are only counted."""
    return {
        "requests_that_differ": plan.num_differing,
        "examples": plan.differing,
        "rows": [_difference_document(row) for row in plan.rows],
        "unpriced": [_difference_document(row) for row in plan.unpriced],
        "charges_in_other_currencies": plan.num_other_currency,
    }


def _difference_document(row: "Difference") -> Document:
    return {
        "tenant": row.tenant,
        "model": row.model,
        "currency": row.currency,
        "requests": row.charges,
        "charged": format_units(row.charged),
        "planned": format_units(row.planned),
        "change": format_units(row.change),
    }


def proof_document(proof: Proof, took_s: float) -> Document:
    return {
        "ok": proof.ok,
        "entries": proof.num_entries,
        "tenants": proof.num_tenants,
        "seconds": round(took_s, 3),
        "revenue": {currency: format_units(units) for currency, units in proof.revenue.items()},
        "problems": [
            {
                "tenant": problem.tenant,
                "entry": problem.seq,
                "request_id": problem.request_id,
                "invariant": problem.invariant,
                "message": problem.message,
            }
            for problem in proof.problems
        ],
    }


def hold_document(hold: StoredHold, now_ns: int) -> Document:
    """An open hold: its request's age, and the progress last reported."""
    ref, context = decode_request(hold.body)
    return {
        "tenant": hold.tenant,
        "request_id": hold.request_id,
        "amount": format_units(hold.amount),
        "model": ref.model,
        "key": context.key_id,
        "session": context.session,
        "server": hold.owner,
        "age_s": round((now_ns - context.admitted_ns) / NS, 3),
        "expires_in_s": round((hold.expires_ns - now_ns) / NS, 3),
        "sent": hold.usage.record(),
    }


def entry_document(entry: Entry) -> Document:
    """A ledger entry. `amount` is the tenant's gain; `postings` sum to zero."""
    return {
        "tenant": entry.tenant,
        "entry": entry.seq,
        "kind": entry.kind.value,
        "request_id": entry.request_id,
        "at_ns": entry.at_ns,
        "currency": entry.currency,
        "amount": format_units(entry.amount),
        "postings": {name: format_units(units) for name, units in entry.amounts.items()},
        "details": entry.stated,
        "hash": entry.hash.hex(),
    }


def trail_document(row: dict[str, Any]) -> Document:
    """A row of the admin trail, with values before and after; amounts are decimals here."""
    values = {name: orjson.loads(row[name]) for name in ("before", "after")}
    for value in values.values():
        if value and value.get("credit_limit") is not None:
            value["credit_limit"] = format_units(int(value["credit_limit"]))
        if value and "suspended" in value:
            value["suspended"] = value["suspended"] == "True"
    return row | values
