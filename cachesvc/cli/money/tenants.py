"""`cachesvc tenants`: who is billed."""

import time
from typing import Annotated

import typer

from billing.accounts import Tenant
from billing.money import format_units, parse_amount
from billing.reports.documents import tenant_document
from cachesvc.cli.money.books import (
    DatabaseUrl,
    DataDir,
    Reason,
    TenantName,
    actor,
    books,
    limit_text,
)
from cachesvc.cli.render import AsJson, note, print_json, print_pairs, print_table

app = typer.Typer(no_args_is_help=True, help="Create and list tenants")

Limit = Annotated[
    str | None,
    typer.Option("--postpaid", metavar="AMOUNT", help="Postpaid up to this amount, or `unlimited`"),
]


@app.command()
def create(
    tenant: TenantName,
    currency: Annotated[str | None, typer.Option(help="Three capitals [card's own]")] = None,
    postpaid: Limit = None,
    reason: Reason = "",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Create a tenant; prepaid unless told otherwise."""
    with books(data_dir, database, create=True) as open_books:
        accounts = open_books.accounts
        made = accounts.create_tenant(
            tenant,
            currency or accounts.usual_currency,
            credit_limit=parse_limit(postpaid),
            by=actor(),
            reason=reason,
        )
        show_tenant(made, json)
        if accounts.book.in_force(time.time_ns(), made.currency) is None:
            if made.currency != accounts.usual_currency:
                note(
                    f"no rate card in {made.currency} is in force: its requests are refused until "
                    "one is applied with `cachesvc prices apply`"
                )
            elif not json:
                note("the server's first start puts `billing.first_card` in force")


@app.command("list")
def list_tenants(
    data_dir: DataDir = None, database: DatabaseUrl = None, json: AsJson = False
) -> None:
    """List tenants and what they have."""
    with books(data_dir, database) as open_books:
        tenants = open_books.accounts.tenants()
        if json:
            print_json([tenant_document(tenant) for tenant in tenants])
            return
        columns = ("tenant", "kind", "currency", "granted", "topped up", "owed", "held")
        print_table(
            (*columns, "available"),
            [
                (
                    found.tenant + (" (suspended)" if found.suspended else ""),
                    "prepaid" if found.prepaid else "postpaid",
                    found.currency,
                    format_units(found.granted),
                    format_units(found.topup),
                    format_units(found.owed),
                    format_units(found.held),
                    limit_text(found.available),
                )
                for found in tenants
            ],
            right=(*columns[3:], "available"),
            spare=("held", "granted", "topped up"),
        )


@app.command()
def show(
    tenant: TenantName, data_dir: DataDir = None, database: DatabaseUrl = None, json: AsJson = False
) -> None:
    """Show one tenant."""
    with books(data_dir, database) as open_books:
        show_tenant(open_books.accounts.tenant(tenant), json)


@app.command()
def limit(
    tenant: TenantName,
    amount: Annotated[str, typer.Argument(help="0 for prepaid, an amount, or `unlimited`")],
    reason: Reason = "",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Set how far below zero a tenant may go."""
    with books(data_dir, database) as open_books:
        changed = open_books.accounts.set_credit_limit(
            tenant, parse_limit(amount), by=actor(), reason=reason
        )
        show_tenant(changed, json)


@app.command()
def suspend(
    tenant: TenantName, reason: Reason = "", data_dir: DataDir = None, database: DatabaseUrl = None
) -> None:
    """Refuse new requests of a tenant; running ones end as they would."""
    with books(data_dir, database) as open_books:
        open_books.accounts.set_suspended(tenant, True, by=actor(), reason=reason)
        note(f"tenant {tenant} is suspended")


@app.command()
def resume(
    tenant: TenantName, reason: Reason = "", data_dir: DataDir = None, database: DatabaseUrl = None
) -> None:
    """Serve a suspended tenant again."""
    with books(data_dir, database) as open_books:
        open_books.accounts.set_suspended(tenant, False, by=actor(), reason=reason)
        note(f"tenant {tenant} is served again")


@app.command()
def project(
    tenant: TenantName,
    name: Annotated[str, typer.Argument(help="Name of the project")],
    reason: Reason = "",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Add a project, to split a tenant's usage by."""
    with books(data_dir, database) as open_books:
        open_books.accounts.create_project(tenant, name, by=actor(), reason=reason)
        note(f"project {name} of tenant {tenant} is created")


def parse_limit(text: str | None) -> int | None:
    """Units of a credit limit; None is unlimited."""
    if text is None:
        return 0
    return None if text == "unlimited" else parse_amount(text)


def show_tenant(tenant: Tenant, json: bool) -> None:
    """Print a tenant as JSON or as pairs."""
    values = tenant_document(tenant)
    if json:
        print_json(values)
        return
    unlimited = {"credit_limit", "available"}
    print_pairs({k: "unlimited" if v is None and k in unlimited else v for k, v in values.items()})
