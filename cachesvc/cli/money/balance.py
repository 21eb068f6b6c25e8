"""`cachesvc balance`: what a tenant has, and giving it more."""

import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from billing.ledger import Ledger
from billing.money import parse_not_negative, parse_positive
from cachesvc.cli.money.books import DatabaseUrl, DataDir, Reason, TenantName, actor, books
from cachesvc.cli.money.tenants import show_tenant
from cachesvc.cli.render import AsJson

app = typer.Typer(no_args_is_help=True, help="Show balances; book money in and out")

Amount = Annotated[str, typer.Argument(help="Decimal amount, such as 12.50", show_default=False)]
Why = Annotated[str, typer.Option("--reason", help="Why; kept in the entry and the admin trail")]
_BOOK: dict[str, Any] = {
    "grant": Ledger.grant,
    "topup": Ledger.deposit,
    "withdraw": Ledger.withdraw,
    "chargeback": Ledger.charge_back,
}
Reference = Annotated[
    str | None,
    typer.Option(help="Your own id of the payment: booked once, however often it is said"),
]


@app.command()
def show(
    tenant: TenantName, data_dir: DataDir = None, database: DatabaseUrl = None, json: AsJson = False
) -> None:
    """Show what a tenant has, owes and has on hold."""
    with books(data_dir, database) as open_books:
        show_tenant(open_books.accounts.tenant(tenant), json)


@app.command()
def grant(
    tenant: TenantName,
    amount: Amount,
    reference: Reference = None,
    reason: Reason = "",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Give promotional money; it is spent before paid money."""
    _book("grant", tenant, amount, reference, reason, data_dir, database, json)


@app.command()
def topup(
    tenant: TenantName,
    amount: Amount,
    reference: Reference = None,
    reason: Reason = "",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Book money that was paid; what is owed is settled first."""
    _book("topup", tenant, amount, reference, reason, data_dir, database, json)


@app.command()
def withdraw(
    tenant: TenantName,
    amount: Amount,
    reason: Why,
    reference: Reference = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Book paid money that was paid out again; no more than is neither spent nor on hold."""
    _book("withdraw", tenant, amount, reference, reason, data_dir, database, json)


@app.command()
def chargeback(
    tenant: TenantName,
    amount: Amount,
    reason: Why,
    reference: Reference = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Book a payment that the payer's bank took back; what was spent of it is owed."""
    _book("chargeback", tenant, amount, reference, reason, data_dir, database, json)


@app.command()
def adjust(
    tenant: TenantName,
    deposit: Annotated[str, typer.Argument(help="Reference of the top-up or grant")],
    amount: Annotated[str, typer.Argument(help="What it should have been; 0 undoes it")],
    reason: Why,
    reference: Reference = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Put a mistyped top-up or grant right by an entry of the difference."""
    with books(data_dir, database) as open_books:
        units = parse_not_negative(amount)
        name = reference or f"adjust_{secrets.token_hex(8)}"
        open_books.with_ledger(
            lambda ledger: ledger.adjust(
                tenant, deposit, units, reference=name, by=actor(), reason=reason
            ).result()
        )
        show_tenant(open_books.accounts.tenant(tenant), json)


def _book(
    kind: str,
    tenant: str,
    amount: str,
    reference: str | None,
    reason: str,
    data_dir: Path | None,
    database: str | None,
    json: bool,
) -> None:
    with books(data_dir, database) as open_books:
        units = parse_positive(amount)
        name = reference or f"{kind}_{secrets.token_hex(8)}"
        open_books.with_ledger(
            lambda ledger: _BOOK[kind](
                ledger, tenant, units, reference=name, by=actor(), reason=reason
            ).result()
        )
        show_tenant(open_books.accounts.tenant(tenant), json)
