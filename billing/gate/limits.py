"""Hard limits on the spending of a tenant, key, user or tag in a day or month (UTC). Pure.

A limit is one more condition of a hold: what its period has charged, what running requests hold and
the new hold do not exceed it together. A request counts in the period of its admission. A refund
takes its amount off the period of the charge. Charges say which limits their hold was checked under
and when, from which the proof checks them again (`billing.proof.limits`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from billing.errors import SpendLimitReached
from billing.money import format_units
from billing.prices.book import NS

_FORMATS = {"day": "%Y-%m-%d", "month": "%Y-%m"}
EACH = "*"  # as a limit's value: every key or user by itself


def period_of(per: str, at_ns: int) -> str:
    """The `day` or `month` of an instant, such as 2026-11-23 or 2026-11."""
    return datetime.fromtimestamp(at_ns // NS, UTC).strftime(_FORMATS[per])


def period_ns(period: str) -> tuple[int, int]:
    """The beginnings of a day or month and of the next."""
    is_month = len(period) == len("2026-11")
    form = _FORMATS["month" if is_month else "day"]
    first = datetime.strptime(period, form).replace(tzinfo=UTC)
    after = (first + timedelta(days=31)).replace(day=1) if is_month else first + timedelta(days=1)
    return int(first.timestamp()) * NS, int(after.timestamp()) * NS


class Spender(NamedTuple):
    """Whose spending in one period one limit bounds."""

    limit: str  # its name
    period: str  # such as 2026-11 or 2026-11-23
    value: str  # of the key, user or tag; empty for the tenant


class Spending(NamedTuple):
    """What a spender was charged, minus refunds, and what its running requests hold."""

    charged: int = 0
    held: int = 0

    def plus(self, charged: int, held: int) -> "Spending":
        return Spending(self.charged + charged, self.held + held)


NOTHING = Spending()


@dataclass(frozen=True, slots=True)
class Checked:
    """The last check of a hold: after entry `at`, under these limits' versions."""

    at: int
    limits: Mapping[str, int] = field(default_factory=dict)  # by name


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendLimit:
    """One hard limit, a budget. `value` is the key's id, the user, or the tag as `name=value`.

    Empty, it bounds the whole tenant. `EACH` bounds every key or user by itself.

    Requests count that are admitted from `since_ns`, the beginning of a period. `version` is the
    number of the decision in the admin trail.
    """

    name: str
    tenant: str
    amount: int
    per: str = "month"  # or day
    of: str = "tenant"  # or key, user, tag
    value: str = ""
    since_ns: int = 0
    version: int = 0

    def spender(self, details: Mapping[str, Any], admitted_ns: int) -> Spender | None:
        """Whose spending a request counts as; None if this limit does not count it.

        `details` is the body of its hold or charge.
        """
        value = _value(self.of, self.value, details)
        if value is None:
            return None
        spender = Spender(self.name, period_of(self.per, admitted_ns), value)
        return spender if self.counts(spender) else None

    def counts(self, spender: Spender) -> bool:
        since_ns = period_ns(spender.period)[0]
        return since_ns >= self.since_ns and self.value in (spender.value, EACH)


def _value(of: str, wanted: str, details: Mapping[str, Any]) -> str | None:
    if of == "tenant":
        return ""
    if of == "tag":
        name = wanted.partition("=")[0]
        tags = details.get("tags", {})
        return f"{name}={tags[name]}" if name in tags else None
    found: str = details.get(of, "")
    return found


def reached(
    limit: SpendLimit, spender: Spender, spending: Spending, *, needed: int, currency: str
) -> SpendLimitReached:
    """The refusal of a hold, with the amounts and the end of the period."""
    ends_ns = period_ns(spender.period)[1]
    ends = datetime.fromtimestamp(ends_ns // NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    whose = f"{limit.of} {(spender.value or limit.tenant)!r}"
    message = (
        f"spend limit {limit.name!r} of {whose} is reached: of {format_units(limit.amount)} "
        f"{currency} a {limit.per}, {format_units(spending.charged)} are spent and "
        f"{format_units(spending.held)} held by running requests; this one needs "
        f"{format_units(needed)}; the limit ends at {ends}"
    )
    return SpendLimitReached(
        message=message,
        limit=limit.name,
        of=limit.of,
        value=spender.value,
        per=limit.per,
        amount=limit.amount,
        spent=spending.charged,
        held=spending.held,
        needed=needed,
        currency=currency,
        ends_ns=ends_ns,
    )
