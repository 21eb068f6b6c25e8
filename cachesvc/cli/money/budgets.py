"""`cachesvc budgets`: what tenants, keys, users and tags may spend before somebody is told."""

import time
from typing import Annotated

import typer

from billing.alerts.budgets import Budget, BudgetSpan, Of, all_budgets, remove_budget, set_budget
from billing.money import format_units, parse_positive
from cachesvc.cli.money.books import DatabaseUrl, DataDir, Reason, TenantName, actor, books
from cachesvc.cli.render import AsJson, note, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="Tell somebody when money runs out or runs away")

Name = Annotated[str, typer.Argument(help="Name of the budget", show_default=False)]


@app.command("set")
def set_(
    name: Name,
    tenant: TenantName,
    amount: Annotated[str, typer.Argument(help="Decimal amount, such as 12.50")],
    per: Annotated[
        BudgetSpan, typer.Option(help="Charges of a day or month (UTC), or the least balance")
    ] = BudgetSpan.MONTH,
    of: Annotated[Of, typer.Option(help="Whose charges")] = Of.TENANT,
    value: Annotated[str, typer.Option(help="The key's id, the user, or NAME=VALUE of a tag")] = "",
    reason: Reason = "",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Make a budget or change it. The server tells at 80 and 100 percent; it stops nothing."""
    with books(data_dir, database) as open_books:
        budget = Budget(
            name=name,
            tenant=tenant,
            amount=parse_positive(amount),
            span=per,
            of=of,
            value=value,
        )
        now_ns = time.time_ns()
        set_budget(open_books.accounts, budget, by=actor(), now_ns=now_ns, reason=reason)
        note(f"budget {name} is set; `billing.alerts_to` says who is told")


@app.command("list")
def list_(data_dir: DataDir = None, database: DatabaseUrl = None, json: AsJson = False) -> None:
    """List the budgets."""
    with books(data_dir, database) as open_books:
        found = [
            {
                "name": budget.name,
                "tenant": budget.tenant,
                "amount": format_units(budget.amount),
                "per": budget.span.value,
                "of": budget.of.value,
                "value": budget.value,
            }
            for budget in all_budgets(open_books.store)
        ]
        if json:
            print_json(found)
            return
        columns = ("name", "tenant", "amount", "per", "of", "value")
        print_table(columns, [[row[c] for c in columns] for row in found], right=("amount",))


@app.command()
def remove(
    name: Name, reason: Reason = "", data_dir: DataDir = None, database: DatabaseUrl = None
) -> None:
    """Remove a budget."""
    with books(data_dir, database) as open_books:
        now_ns = time.time_ns()
        remove_budget(open_books.store, name, by=actor(), now_ns=now_ns, reason=reason)
        note(f"budget {name} is removed")
