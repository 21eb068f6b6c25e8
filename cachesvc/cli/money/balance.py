"""`cachesvc balance`: what a tenant has, and giving it more."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from billing.money import parse_positive
from cachesvc.cli.money.books import DatabaseUrl, DataDir, Reason, TenantName, actor, books
from cachesvc.cli.money.tenants import show_tenant
from cachesvc.cli.render import AsJson

app = typer.Typer(no_args_is_help=True, help="Show, grant and top up balances")

Amount = Annotated[str, typer.Argument(help="Decimal amount, such as 12.50", show_default=False)]
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
            lambda ledger: (ledger.grant if kind == "grant" else ledger.deposit)(
                tenant, units, reference=name, by=actor(), reason=reason
            ).result()
        )
        show_tenant(open_books.accounts.tenant(tenant), json)
