"""What a card grants and asks by the month: included tokens, and a minimum. Pure.

Included tokens are spent in the order of a tenant's entries, so the chain alone tells how many were
left for each charge. The minimum is booked once, when the month is over, as a charge of its own:
the difference between it and what the month's charges came to. Months are of UTC.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from billing.gate.commands import CloseMonth
from billing.gate.entries import Entry, Kind
from billing.gate.holds import RequestContext, request_body
from billing.gate.outcomes import Outcome
from billing.gate.postings import spend
from billing.gate.work import Used, Work
from billing.prices.book import MONTHLY, NS, PinnedRate, PriceBook, RateCard, RateRef
from billing.prices.rating import Charge, Line, rate
from billing.usage import Usage

GRACE_NS = 6 * 3600 * NS  # after the end of a month; what was admitted in it is settled by then
REFERENCE = "minimum:"  # and the month


def month_of(at_ns: int) -> str:
    """The month (UTC) that an instant lies in, such as 2026-11."""
    return datetime.fromtimestamp(at_ns // NS, UTC).strftime("%Y-%m")


def month_ns(month: str) -> tuple[int, int]:
    """When a month begins, and when the next one does."""
    first = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC)
    after = (first + timedelta(days=31)).replace(day=1)
    return int(first.timestamp()) * NS, int(after.timestamp()) * NS


def closing_ns(month: str) -> int:
    """Where a month's minimum is dated: within its last day in nearly every zone of the world."""
    return month_ns(month)[1] - 18 * 3600 * NS


def includes(
    pinned: PinnedRate, month: str, used: Mapping[Used, int], tenant: str
) -> dict[str, int]:
    """How many tokens of each item are left in a month."""
    return {
        item.name: item.tokens - used.get((tenant, month, pinned.ref.card, item.name), 0)
        for item in pinned.included
    }


def included_body(charge: Charge) -> dict[str, Any]:
    """What an entry says of the included tokens that it spent."""
    if not charge.taken:
        return {}
    return {"included": dict(charge.taken), "included_amount": str(charge.included)}


def charge_in(details: Mapping[str, Any], pinned: PinnedRate) -> Charge:
    """The charge that the body of an entry tells of."""
    if "commitment" in details:
        missing = int(details.get("fees", 0))
        lines = (Line("monthly_minimum", 1, missing, missing),) if missing else ()
        return Charge(lines, missing, 0, pinned.currency, missing)
    return rate(Usage.from_record(details.get("usage", {})), pinned, details.get("included", {}))


def committing_card(book: PriceBook, tenant: str, currency: str, month: str) -> RateCard | None:
    """The tenant's own card at the end of a month, if it asks a minimum and was valid all month."""
    card = book.in_force(closing_ns(month), currency, tenant)
    if card is None or not card.monthly_minimum or card.valid_from_ns > month_ns(month)[0]:
        return None
    return card


def commitment_ref(card: RateCard) -> RateRef:
    """The price of a card's minimum, which can be found like any other."""
    return RateRef(card.name, card.version, card.models[0].pattern, MONTHLY)


def close_month(work: Work, command: CloseMonth) -> Entry | None:
    """Book what the charges of a month are short of the minimum, once; None where none is asked."""
    account = work.account(command.tenant)
    reference = REFERENCE + command.month
    standing = work.entry(command.tenant, reference, Kind.CHARGE)
    card = committing_card(work.book, command.tenant, account.currency, command.month)
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
