"""`cachesvc tenants budget`: alerts or refusals when spending passes an amount."""

from typing import Annotated

import typer

from billing.alerts.budgets import BudgetSpan, Of
from billing.operations import budgets
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.render import fail, note, print_documents

AMOUNTS = ("amount", "spent", "held", "left")
COLUMNS = (
    *("name", "tenant", "amount", "per", "of", "value"),
    *("ask", "spent", "held", "left", "ends_at"),
)


@operating("reason", "json")
def budget(
    call: Invocation,
    name: Annotated[str | None, typer.Argument(help="Name of the budget  [list all]")] = None,
    tenant: Annotated[str, typer.Argument(help="Name of the tenant", show_default=False)] = "",
    amount: Annotated[
        str, typer.Argument(help="Decimal amount, such as 12.50", show_default=False)
    ] = "",
    per: Annotated[
        BudgetSpan,
        typer.Option(
            help=(
                "Charges of a day or month (UTC), a minimum balance, the same with a top-up, "
                "or an unusual hour"
            )
        ),
    ] = BudgetSpan.MONTH,
    of: Annotated[Of, typer.Option(help="Which charges count")] = Of.TENANT,
    value: Annotated[
        str,
        typer.Option(
            help="The key's id, the user, or NAME=VALUE of a tag; with --hard, * for each"
        ),
    ] = "",
    hard: Annotated[
        bool, typer.Option("--hard", help="Refuse requests that would pass it, until it ends")
    ] = False,
    ask: Annotated[str, typer.Option(help="With --per topup: the top-up to ask for")] = "",
    most: Annotated[int, typer.Option(help="With --per topup: at most so often a day  [3]")] = 0,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the budget")] = False,
) -> None:
    """Create, change, remove or list budgets.

    A server with `billing.alerts_to` alerts at 80 and 100 percent, or asks for a top-up. Only a
    hard budget of a day or month stops requests.
    """
    if name is None:
        print_documents(call(budgets.list_budgets), call.json, COLUMNS, right=AMOUNTS)
        return
    if remove:
        call(budgets.remove_budget, name=name, by=call.by, why=call.why)
        note(f"budget {name} is removed")
        return
    if not (tenant and amount):
        fail("say whose budget and how much: TENANT AMOUNT; or --remove", 2)
    call(
        budgets.set_budget,
        name=name,
        tenant=tenant,
        amount=amount,
        per=per,
        of=of,
        value=value,
        ask=ask,
        most=most,
        hard=hard,
        by=call.by,
        why=call.why,
    )
    limits = "; it refuses requests from now on" if hard else ""
    alerts = "; alerts are posted by a server with `billing.alerts_to`, to that URL"
    note(f"budget {name} is set{limits}{'' if hard and value == '*' else alerts}")
