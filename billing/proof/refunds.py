"""A batch of corrections from a re-rating: the amounts charged above the current cards.

One person makes a batch and writes it to a file. Another applies it by its digest, so exactly what
was reviewed is booked. Charges that would cost more now stay as they are: no money is taken without
consent.
"""

import hashlib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from billing.errors import BillingError, NoPrice
from billing.gate.entries import Entry, Kind
from billing.gate.holds import rate_ref
from billing.money import format_units, parse_units
from billing.prices.rating import charge_in
from billing.proof.rerate import Pricing, terms_of
from billing.proof.result import UNREADABLE
from billing.store import reports as store_reports
from billing.store.store import LedgerStore


@dataclass(frozen=True, slots=True)
class Refund:
    """The refund of one request, as a decimal text."""

    tenant: str
    request_id: str
    currency: str
    amount: str

    @property
    def units(self) -> int:
        return parse_units(self.amount)


@dataclass(frozen=True, slots=True)
class RefundBatch:
    """Refunds in the order of their charges. `dearer` counts charges that would cost more."""

    refunds: tuple[Refund, ...]
    made_by: str
    dearer: int = 0

    @property
    def digest(self) -> str:
        """A digest of exactly these refunds."""
        lines = orjson.dumps([asdict(refund) for refund in self.refunds])
        return hashlib.sha256(b"cachesvc.refunds.v1\0" + lines).hexdigest()[:16]

    def totals(self) -> dict[str, int]:
        """Units by currency."""
        sums: dict[str, int] = {}
        for refund in self.refunds:
            sums[refund.currency] = sums.get(refund.currency, 0) + refund.units
        return sums

    def document(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "made_by": self.made_by,
            "totals": {name: format_units(units) for name, units in self.totals().items()},
            "charges_that_would_cost_more": self.dearer,
            "refunds": [asdict(refund) for refund in self.refunds],
        }


def read_batch(text: bytes) -> RefundBatch:
    """The batch in a document. Raises `BillingError` if the digest differs."""
    try:
        data = orjson.loads(text)
        refunds = tuple(Refund(**refund) for refund in data["refunds"])
        batch = RefundBatch(
            refunds, str(data["made_by"]), int(data["charges_that_would_cost_more"])
        )
        named = data["digest"]
    except UNREADABLE as error:
        raise BillingError(f"this is not a batch of refunds: {error}") from error
    if batch.digest != named:
        raise BillingError(
            f"the batch was changed: its digest is {batch.digest}, and it says {named}"
        )
    return batch


def make_batch(
    store: LedgerStore,
    pricing: Pricing,
    *,
    made_by: str,
    since_ns: int = 0,
    tenant: str | None = None,
) -> RefundBatch:
    """The excess of every charge since an instant over its price under `pricing`. Books nothing."""
    refunds: list[Refund] = []
    dearer = 0
    with store.reading() as connection:
        entries = store_reports.stream_entries(connection, tenant, since_ns=since_ns)
        charges: list[Entry] = []
        given: dict[tuple[str, int], list[Entry]] = {}
        for entry in entries:
            if entry.kind is Kind.CHARGE and entry.moment_ns >= since_ns:
                charges.append(entry)
            elif entry.kind is Kind.CORRECTION:
                given.setdefault((entry.tenant, entry.details["corrects"]), []).append(entry)
    for entry in charges:
        excess = _excess(entry, pricing, given.get((entry.tenant, entry.seq), ()))
        dearer += excess < 0
        if excess > 0:
            amount = format_units(excess)
            refunds.append(Refund(entry.tenant, entry.request_id, entry.currency, amount))
    return RefundBatch(tuple(refunds), made_by, dearer)


def _excess(entry: Entry, pricing: Pricing, corrections: Collection[Entry]) -> int:
    """The rest of a charge above its current price.

    Zero if it has no price, or was settled late with another usage.
    """
    details = entry.details
    moment_ns = details.get("admitted_ns", entry.moment_ns)
    try:
        pinned = pricing(rate_ref(details).model, moment_ns, entry.currency, terms_of(entry))
    except NoPrice:
        return 0
    if pinned is None or any("card" in each.details for each in corrections):
        return 0
    planned = charge_in(details, pinned).amount
    left = -entry.amount - sum(each.amount for each in corrections)
    return left - planned
