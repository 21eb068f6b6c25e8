"""`cachesvc balance`: money in and out of a tenant's balance."""

import time
from typing import Annotated, Any

import typer

from billing.money import format_units, parse_positive, parse_units
from billing.operations import balance, ledger
from billing.operations.balance import Booking
from billing.prices.book import NS
from cachesvc.cli.lazy import without
from cachesvc.cli.money.books import (
    TenantName,
)
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.money.tenants import print_tenant
from cachesvc.cli.render import confirm, note

_REMOVED = {
    "adjust": "`cachesvc ledger correct TENANT REFERENCE --to AMOUNT`",
    "show": "`cachesvc tenants show TENANT`",
    "chargeback": "`cachesvc balance withdraw TENANT AMOUNT --chargeback`",
}

app = typer.Typer(cls=without(_REMOVED), no_args_is_help=True, help="Book money in and out")

Amount = Annotated[str, typer.Argument(help="Decimal amount, such as 12.50", show_default=False)]
Reference = Annotated[
    str | None,
    typer.Option(help="Your own id of the payment; each id is booked once"),
]

RECENT = 20  # entries in which a repeated booking is looked for
A_MINUTE_S = 60
_KINDS = {
    Booking.GRANT: "grant",
    Booking.TOPUP: "topup",
    Booking.WITHDRAW: "withdrawal",
    Booking.CHARGEBACK: "chargeback",
}
Currency = Annotated[
    str | None, typer.Option(help="Currency of the wallet, if not the tenant's own")
]


@app.command()
@operating("reason", "yes", "json")
def grant(
    call: Invocation,
    tenant: TenantName,
    amount: Amount,
    reference: Reference = None,
    expires: Annotated[
        str | None, typer.Option(help="Last day (UTC): 2027-01-31, or 90d from now  [never]")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--for",
            help="Only for a model, or MODEL@TERM: a window, group or service tier; repeatable",
        ),
    ] = None,
) -> None:
    """Give promotional money. It is spent before paid money, earliest expiry first.

    With --for it pays only for these requests, and before all other money.
    """
    about = {"expires": expires, "scope": scope}
    _book(call, Booking.GRANT, tenant, amount, reference, **about)


@app.command()
@operating("reason", "yes", "json")
def topup(
    call: Invocation,
    tenant: TenantName,
    amount: Amount,
    currency: Currency = None,
    rate: Annotated[
        str | None, typer.Option(help="Convert from the wallet, at this value of one of its units")
    ] = None,
    rate_date: Annotated[
        str | None, typer.Option(help="The rate's day, such as 2026-11-20")
    ] = None,
    rate_source: Annotated[str | None, typer.Option(help="Who publishes it, such as ECB")] = None,
    reference: Reference = None,
) -> None:
    """Book a payment. It first settles what the tenant owes.

    Money in another currency goes into a wallet. With --rate, the amount is converted from there.
    """
    wallet = {"currency": currency, "rate": rate}
    wallet |= {"rate_date": rate_date, "rate_source": rate_source}
    _book(call, Booking.TOPUP, tenant, amount, reference, **wallet)


@app.command()
@operating("why", "yes", "json")
def withdraw(
    call: Invocation,
    tenant: TenantName,
    amount: Amount,
    chargeback: Annotated[
        bool,
        typer.Option("--chargeback", help="The payer's bank took it back"),
    ] = False,
    currency: Currency = None,
    reference: Reference = None,
) -> None:
    """Book money that you paid back, at most what is neither spent nor on hold."""
    kind = Booking.CHARGEBACK if chargeback else Booking.WITHDRAW
    _book(call, kind, tenant, amount, reference, currency=currency)


def _book(
    call: Invocation, kind: Booking, tenant: str, amount: str, reference: str | None, **about: Any
) -> None:
    if call.asks:
        _show_before(call, kind, tenant, amount, reference, about.get("currency"))
    booked = call(
        balance.book_deposit,
        tenant=tenant,
        kind=kind,
        amount=amount,
        reference=reference,
        **about,
        by=call.by,
        why=call.why,
    )
    print_tenant(booked, call.json)


def _show_before(
    call: Invocation,
    kind: Booking,
    tenant: str,
    amount: str,
    reference: str | None,
    currency: str | None,
) -> None:
    """Says what the tenant has, and asks; twice if the same was booked within a minute."""
    units = parse_positive(amount)
    has = call(balance.show_balance, tenant=tenant)
    note(f"{tenant} has {has['balance']} {has['currency']}, and {has['held']} of it on hold")
    sum_ = f"{format_units(units)} {currency or has['currency']}"
    confirm(f"Book a {kind} of {sum_} for {tenant}?", yes=False)
    for entry in call(ledger.list_entries, tenant=tenant, limit=RECENT):
        age_s = (time.time_ns() - entry["at_ns"]) // NS
        details = entry["details"]
        same = entry["kind"] in (_KINDS[kind], "wallet", "conversion")
        same &= details.get("wallet", has["currency"]) == (currency or has["currency"])
        same &= units == abs(parse_units(details.get("moves", entry["amount"])))
        if same and age_s < A_MINUTE_S and entry["request_id"] != reference:
            name = entry["request_id"]
            confirm(f"The same was booked {age_s} s ago, as {name!r}. Book it again?", yes=False)
            return
