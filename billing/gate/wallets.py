"""Wallets: money that a tenant paid in other currencies than its own. Pure.

A wallet pays for nothing by itself. Its money is paid out, or converted into the balance at a rate
that the entry records with its date and source. Postings are in the tenant's own currency and never
include wallets; the entry's body says what it moves.
"""

from collections.abc import Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from billing.errors import AlreadyExists, InvalidAmount, InvalidName, InvalidSpan
from billing.gate.commands import MoveWallet
from billing.gate.entries import Entry, Kind
from billing.gate.postings import pay_in
from billing.gate.work import SYSTEM, Work, insufficient_balance
from billing.money import check_currency, format_units
from billing.names import check_text

_MOST_RATE = 10**9
_PLACES = 12


def check_rate(rate: str, on: str, source: str) -> str:
    """The rate as a plain decimal. Raises `InvalidAmount`, `InvalidSpan` or `InvalidName`."""
    try:
        value = Decimal(rate)
    except InvalidOperation:
        raise InvalidAmount(f"rate {rate!r} is not a decimal such as 7.1") from None
    exponent = value.as_tuple().exponent
    if not value.is_finite() or not 0 < value <= _MOST_RATE or int(exponent) < -_PLACES:
        raise InvalidAmount(f"rate {rate}: above zero, with at most {_PLACES} decimal places")
    try:
        date.fromisoformat(on)
    except ValueError:
        raise InvalidSpan(f"the rate's date {on!r} is not a day such as 2026-11-20") from None
    if not source.strip():
        raise InvalidName("say where the rate is from, such as ECB")
    check_text(source, "source of the rate")
    return format(value, "f")


def converted(amount: int, rate: str) -> int:
    """`amount` times the rate, rounded down to whole units."""
    return int(amount * Fraction(Decimal(rate)))


def wallet_effect(details: Mapping[str, Any]) -> str:
    """An entry's effect on a wallet, for the admin trail; empty if none."""
    if "wallet" not in details:
        return ""
    text = f"{details['wallet']} {format_units(int(details['moves']))}"
    if "rate" in details:
        text += f" at {details['rate']} of {details['rate_date']} by {details['rate_source']}"
    return text


def move(work: Work, command: MoveWallet) -> Entry:
    """Pays into or out of a wallet, or converts some of it into the balance; once per reference."""
    account = work.account(command.tenant)
    check_currency(command.currency)
    if command.by == SYSTEM:
        raise InvalidName(f"{SYSTEM!r} is the server's own name; say who decides")
    if command.currency == account.currency:
        raise InvalidAmount(
            f"tenant {command.tenant!r} is charged in {command.currency}: that is its balance, and "
            "no wallet; leave the currency out"
        )
    kind = Kind.CONVERSION if command.rate else Kind.WALLET
    body: dict[str, Any] = {
        "wallet": command.currency,
        "moves": str(command.amount),
        "by": command.by,
        "reason": command.reason,
    }
    postings: dict[str, int] = {}
    if command.rate:
        rate = check_rate(command.rate, command.rate_date, command.rate_source)
        gain = converted(-command.amount, rate)
        body |= {"rate": rate, "rate_date": command.rate_date}
        body |= {"rate_source": command.rate_source}
        postings = {**pay_in(account, gain), "cash": -gain}
    standing = work.entry(command.tenant, command.reference, kind)
    if standing is not None:
        if wallet_effect(standing.details) != wallet_effect(body):
            raise AlreadyExists(
                f"reference {command.reference!r} was used for another amount; use a new one"
            )
        return standing
    key = (command.tenant, command.currency)
    left = work.wallets.get(key, 0) + command.amount
    if left < 0:
        raise insufficient_balance(
            command.tenant,
            needed=-command.amount,
            available=left - command.amount,
            currency=command.currency,
        )
    work.wallets[key] = work.put_wallets[key] = left
    return work.post(account, kind, command.reference, postings, body)
