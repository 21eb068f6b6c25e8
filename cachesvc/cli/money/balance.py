"""`cachesvc balance`: money in and out of a tenant's balance."""

import time
from typing import Annotated

import typer

from billing.money import format_units, parse_positive, parse_units
from billing.operations import balance, ledger
from billing.operations.balance import Booking
from billing.prices.book import NS
from cachesvc.cli.lazy import Group
from cachesvc.cli.money.books import TenantName
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.money.tenants import print_tenant
from cachesvc.cli.render import confirm, note

app = typer.Typer(cls=Group, no_args_is_help=True, help="Book money in and out")

Amount = Annotated[str, typer.Argument(help="Decimal amount, such as 12.50", show_default=False)]
Reference = Annotated[
    str | None, typer.Option(help="Your own id of the payment; each id is booked once")
]

RECENT = 20  # entries in which a repeated booking is looked for
A_MINUTE_S = 60


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
) -> None:
    """Give promotional money. It is spent before paid money, earliest expiry first."""
    _book(call, Booking.GRANT, tenant, amount, reference, expires=expires)


@app.command()
@operating("reason", "yes", "json")
def topup(
    call: Invocation, tenant: TenantName, amount: Amount, reference: Reference = None
) -> None:
    """Book a payment. It first settles what the tenant owes."""
    _book(call, Booking.TOPUP, tenant, amount, reference)


@app.command()
@operating("why", "yes", "json")
def withdraw(
    call: Invocation,
    tenant: TenantName,
    amount: Amount,
    chargeback: Annotated[
        bool, typer.Option("--chargeback", help="The payer's bank took it back")
    ] = False,
    reference: Reference = None,
) -> None:
    """Book money that you paid back, at most what is neither spent nor on hold."""
    kind = Booking.CHARGEBACK if chargeback else Booking.WITHDRAW
    _book(call, kind, tenant, amount, reference)


def _book(
    call: Invocation,
    kind: Booking,
    tenant: str,
    amount: str,
    reference: str | None,
    expires: str | None = None,
) -> None:
    if call.asks:
        _show_before(call, kind, tenant, amount, reference)
    given = {"tenant": tenant, "amount": amount, "reference": reference, "expires": expires}
    print_tenant(call.change(balance.book_deposit, kind=kind, **given), call.json)


def _show_before(
    call: Invocation, kind: Booking, tenant: str, amount: str, reference: str | None
) -> None:
    """Says what the tenant has, and asks; twice if the same was booked within a minute."""
    units = parse_positive(amount)
    has = call(balance.show_balance, tenant=tenant)
    note(f"{tenant} has {has['balance']} {has['currency']}, and {has['held']} of it on hold")
    sum_ = f"{format_units(units)} {has['currency']}"
    confirm(f"Book a {kind} of {sum_} for {tenant}?", yes=False)
    for entry in call(ledger.list_entries, tenant=tenant, limit=RECENT):
        age_s = (time.time_ns() - entry["at_ns"]) // NS
        same = entry["kind"] == balance.KINDS[kind] and units == abs(parse_units(entry["amount"]))
        if same and age_s < A_MINUTE_S and entry["request_id"] != reference:
            name = entry["request_id"]
            confirm(f"The same was booked {age_s} s ago, as {name!r}. Book it again?", yes=False)
            return
