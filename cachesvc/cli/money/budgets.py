"""`cachesvc tenants budget`: refusals when spending would pass an amount."""

from typing import Annotated

import typer

from billing.budgets import BudgetSpan, Of
from billing.operations import budgets
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.render import fail, note, print_documents

AMOUNTS = ("amount", "spent", "held", "left")
COLUMNS = ("name", "tenant", "amount", "per", "of", "value", "spent", "held", "left", "ends_at")


@operating("reason", "json")
def budget(
    call: Invocation,
    name: Annotated[str | None, typer.Argument(help="Name of the budget  [list all]")] = None,
    tenant: Annotated[str, typer.Argument(help="Name of the tenant", show_default=False)] = "",
    amount: Annotated[
        str, typer.Argument(help="Decimal amount, such as 12.50", show_default=False)
    ] = "",
    per: Annotated[
        BudgetSpan, typer.Option(help="Charges of a day or a month (UTC)")
    ] = BudgetSpan.MONTH,
    of: Annotated[Of, typer.Option(help="Which charges count")] = Of.TENANT,
    value: Annotated[
        str,
        typer.Option(help="The key's id, the user, or NAME=VALUE of a tag; * for each key or user"),
    ] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the budget")] = False,
) -> None:
    """Create, change, remove or list budgets.

    A request that would pass one is refused until the day or month ends. To be alerted before,
    use the metrics by tenant and the rules in ops/prometheus.
    """
    if name is None:
        print_documents(call(budgets.list_budgets), call.json, COLUMNS, right=AMOUNTS)
        return
    if remove:
        call.change(budgets.remove_budget, name=name)
        note(f"budget {name} is removed")
        return
    if not (tenant and amount):
        fail("say whose budget and how much: TENANT AMOUNT; or --remove", 2)
    given = {"tenant": tenant, "amount": amount, "per": per, "of": of, "value": value}
    call.change(budgets.set_budget, name=name, **given)
    note(f"budget {name} is set; it refuses requests from now on")
