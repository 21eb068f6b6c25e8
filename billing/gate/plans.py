"""A card's monthly terms: included tokens and a minimum. Pure.

Included tokens are spent in the order of a tenant's entries, so the chain alone determines how many
were left for each charge. The minimum is booked once, after the month, as a separate charge: its
difference to the sum of the month's charges. Months are in UTC.
"""

from collections.abc import Mapping
from typing import Any

from billing.gate.commands import CloseMonth
from billing.gate.entries import Entry, Kind
from billing.gate.holds import RequestContext, request_body
from billing.gate.outcomes import Outcome
from billing.gate.periods import period_ns, period_of
from billing.gate.postings import spend
from billing.gate.work import TenantAccount, Used, Work
from billing.prices.book import MONTHLY, NS, PinnedRate, PriceBook, RateCard, RateRef
from billing.prices.rating import Charge, Line, rate
from billing.usage import Usage

GRACE_NS = 6 * 3600 * NS  # after a month's end; its requests are settled by then
REFERENCE = "minimum:"  # followed by the month


def month_of(at_ns: int) -> str:
    """The month (UTC) of an instant, such as 2026-11."""
    return period_of("month", at_ns)


def month_ns(month: str) -> tuple[int, int]:
    """The beginnings of a month and of the next."""
    return period_ns(month)


def closing_ns(month: str) -> int:
    """The date of a month's minimum: within the last day in nearly every time zone."""
    return month_ns(month)[1] - 18 * 3600 * NS


def includes(
    pinned: PinnedRate, month: str, used: Mapping[Used, int], tenant: str
) -> dict[str, int]:
    """The tokens of each item left in a month."""
    return {
        item.name: item.tokens - used.get((tenant, month, pinned.ref.card, item.name), 0)
        for item in pinned.included
    }


def included_body(charge: Charge) -> dict[str, Any]:
    """The included tokens of a charge, for an entry's body."""
    if not charge.taken:
        return {}
    return {"included": dict(charge.taken), "included_amount": str(charge.included)}


def charge_in(details: Mapping[str, Any], pinned: PinnedRate) -> Charge:
    """The charge in an entry's body."""
    if "commitment" in details:
        missing = int(details.get("fees", 0))
        lines = (Line("monthly_minimum", 1, missing, missing),) if missing else ()
        return Charge(lines, missing, 0, pinned.currency, missing)
    return rate(Usage.from_record(details.get("usage", {})), pinned, details.get("included", {}))


def committing_card(book: PriceBook, account: TenantAccount, month: str) -> RateCard | None:
    """The tenant's own card at the end of a month, if its minimum binds in that month.

    It binds from the first full month in which it is valid and applied and the tenant exists. A
    card applied after the month changes nothing in it.
    """
    first_ns, after_ns = month_ns(month)
    known = PriceBook(tuple(card for card in book.cards if card.applied_ns < after_ns))
    card = known.in_force(closing_ns(month), account.currency, account.tenant)
    if card is None or not card.monthly_minimum:
        return None
    return card if binds_from_ns(card, account) <= first_ns else None


def binds_from_ns(card: RateCard, account: TenantAccount) -> int:
    """The instant from which a card's minimum binds a tenant, in full months."""
    return max(card.valid_from_ns, card.applied_ns, account.created_ns)


def first_month(at_ns: int) -> str:
    """The first full month that begins at an instant or after it."""
    month = month_of(at_ns)
    first_ns, after_ns = month_ns(month)
    return month if at_ns <= first_ns else month_of(after_ns)


def commitment_ref(card: RateCard) -> RateRef:
    """The rate reference of a card's minimum."""
    return RateRef(card.name, card.version, card.models[0].pattern, MONTHLY)


def close_month(work: Work, command: CloseMonth) -> Entry | None:
    """Books a month's shortfall against the minimum, once. Returns None if the card has none."""
    account = work.account(command.tenant)
    reference = REFERENCE + command.month
    standing = work.entry(command.tenant, reference, Kind.CHARGE)
    card = committing_card(work.book, account, command.month)
    if standing is not None or card is None:
        return standing
    if work.now_ns < month_ns(command.month)[1] + GRACE_NS:
        return None
    missing = max(0, card.monthly_minimum - work.spent[command.tenant, command.month])
    at_ns = closing_ns(command.month)
    body = request_body(commitment_ref(card), RequestContext(admitted_ns=at_ns)) | {
        "commitment": command.month,
        "outcome": Outcome.FINISHED,
        "saved": "0",
        "fees": str(missing) if missing else "",
    }
    return work.post(
        account, Kind.CHARGE, reference, spend(account, missing), body, billed_ns=at_ns
    )
