"""`cachesvc balance`: money in and out of a tenant's balance."""

from pathlib import Path
from typing import Annotated, Any

import typer

from billing.operations import balance
from billing.operations.balance import Booking
from cachesvc.cli.lazy import without
from cachesvc.cli.money.books import NO_REASON, DatabaseUrl, DataDir, Reason, TenantName, actor
from cachesvc.cli.money.operations import operations
from cachesvc.cli.money.tenants import print_tenant
from cachesvc.cli.render import AsJson

_REMOVED = {
    "adjust": "`cachesvc ledger correct TENANT REFERENCE --to AMOUNT`",
    "show": "`cachesvc tenants show TENANT`",
    "chargeback": "`cachesvc balance withdraw TENANT AMOUNT --chargeback`",
}

app = typer.Typer(cls=without(_REMOVED), no_args_is_help=True, help="Book money in and out")

Amount = Annotated[str, typer.Argument(help="Decimal amount, such as 12.50", show_default=False)]
Why = Annotated[str, typer.Option("--reason", help="Reason for the entry and the admin trail")]
Reference = Annotated[
    str | None,
    typer.Option(help="Your own id of the payment; each id is booked once"),
]

Currency = Annotated[
    str | None, typer.Option(help="Currency of the wallet, if not the tenant's own")
]


@app.command()
def grant(
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
    reason: Reason = NO_REASON,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Give promotional money. It is spent before paid money, earliest expiry first.

    With --for it pays only for these requests, and before all other money.
    """
    about = {"expires": expires, "scope": scope}
    _book(Booking.GRANT, tenant, amount, reference, reason, data_dir, database, json, **about)


@app.command()
def topup(
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
    reason: Reason = NO_REASON,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Book a payment. It first settles what the tenant owes.

    Money in another currency goes into a wallet. With --rate, the amount is converted from there.
    """
    wallet = {"currency": currency, "rate": rate}
    wallet |= {"rate_date": rate_date, "rate_source": rate_source}
    _book(Booking.TOPUP, tenant, amount, reference, reason, data_dir, database, json, **wallet)


@app.command()
def withdraw(
    tenant: TenantName,
    amount: Amount,
    reason: Why,
    chargeback: Annotated[
        bool,
        typer.Option("--chargeback", help="The payer's bank took it back"),
    ] = False,
    currency: Currency = None,
    reference: Reference = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Book money that you paid back, at most what is neither spent nor on hold."""
    kind = Booking.CHARGEBACK if chargeback else Booking.WITHDRAW
    _book(kind, tenant, amount, reference, reason, data_dir, database, json, currency=currency)


def _book(
    kind: Booking,
    tenant: str,
    amount: str,
    reference: str | None,
    reason: str,
    data_dir: Path | None,
    database: str | None,
    json: bool,
    **about: Any,
) -> None:
    with operations(data_dir, database) as call:
        booked = call(
            balance.book_deposit,
            tenant=tenant,
            kind=kind,
            amount=amount,
            reference=reference,
            **about,
            by=actor(),
            why=reason,
        )
        print_tenant(booked, json)
