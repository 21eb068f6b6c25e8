"""`cachesvc prices`: check rate cards, try them on real usage, put them in force."""

import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from api.format import number_of
from billing.money import format_units
from billing.operations import ledger, prices
from billing.prices.book import NS, STANDARD, Rates
from billing.prices.cards import find_card
from billing.prices.lint import CardFinding, Severity, lint
from billing.reports.documents import EXTRAS, RATES, Document, card_document, finding_document
from billing.usage import HIT_CLASSES
from cachesvc.cli.lazy import Group
from cachesvc.cli.money.books import MOST_DAYS, TenantOption
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.render import confirm, fail, note, print_documents, print_json, print_table

app = typer.Typer(cls=Group, no_args_is_help=True, help="Show, check, plan and apply rate cards")

Card = Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped card")]


def _lint(card: str, json: bool) -> None:
    """Exits with 1 if the card can be gamed or loses money against its stated cost."""
    found = lint(find_card(card))
    if json:
        print_json([finding_document(finding) for finding in found])
    else:
        _print_findings(found)
        note("no objection" if not found else number_of(len(found), "finding"))
    if _errors(found):
        sys.exit(1)


@app.command()
@operating("json")
def show(
    call: Invocation,
    card: Annotated[str | None, typer.Argument(help="A card  [all applied cards]")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--lint", help="Only its problems: prices that can be gamed, below cost, or unclear"
        ),
    ] = False,
) -> None:
    """Show the prices of a card, or of all applied cards."""
    if check:
        if card is None:
            fail("--lint checks one card: name it", 2)
        _lint(card, call.json)
        return
    cards = [card_document(find_card(card))] if card is not None else call(prices.applied_cards)
    if call.json:
        print_json(cards)
        return
    for found in cards:
        title = f"{found['name']} {found['version']}, {found['currency']} per million, from "
        title += _instant(found)
        classes = (*RATES, *EXTRAS)
        names = [name.replace("hit_", "") for name in classes]
        rows = [[m["match"], m["window"], *(m[name] for name in classes)] for m in found["models"]]
        spare = ("cache_write", "storage", "remote")
        print_table(("model", "window", *names), rows, title=title, right=names, spare=spare)


@app.command()
def export(
    card: Card,
    models: Annotated[
        list[str], typer.Option("--model", help="A name that clients use; may be repeated")
    ],
    litellm: Annotated[bool, typer.Option("--litellm", help="The only format so far")] = True,
) -> None:
    """Print a card's prices as LiteLLM's price map, for gateways and tools that read it.

    It has one price a class: the standard window, and of cached tokens the dearest tier.
    """
    found = find_card(card)
    if found.currency != "USD":
        fail(f"LiteLLM counts in USD, and {found.name} {found.version} is in {found.currency}")
    for name in models:
        if found.price_of(name) is None:
            fail(f"{found.name} {found.version} has no price for model {name!r}")
    print_json({name: _litellm(found.pin(name, STANDARD).rates) for name in models})
    note(
        "left out, because the map has no field: windows of time and of long prompts, tiers, "
        "explicit caches and storage, fees and minimums of a request, prices of single tenants"
    )


def _litellm(rates: Rates) -> dict[str, object]:
    """A model's entry: dollars a token, as JSON numbers."""
    units = {
        "input_cost_per_token": rates.miss,
        "output_cost_per_token": rates.output,
        "cache_read_input_token_cost": max(rates.of(name) for name in HIT_CLASSES),
        "cache_creation_input_token_cost": rates.miss + rates.cache_write,
        "cache_creation_input_token_cost_above_1hr": rates.miss + rates.cache_write_1h,
    }
    costs = {name: float(format_units(amount)) for name, amount in units.items()}
    return {"litellm_provider": "openai", "mode": "chat", **costs}


@app.command()
@operating("json")
def plan(
    call: Invocation,
    card: Annotated[str | None, typer.Argument(help="A card to try  [the current cards]")] = None,
    days: Annotated[int, typer.Option(min=1, max=MOST_DAYS, help="How many days of usage")] = 30,
    tenant: TenantOption = None,
) -> None:
    """Show what past usage would cost under a card, or under the current cards.

    Changes nothing.
    """
    if card is not None:
        source = {"toml": find_card(card).text}
        found = call(prices.plan_card, card=source, days=days, tenant=tenant)
    else:
        found = call(ledger.rerate_history, tenant=tenant, days=days)
    print_json(found) if call.json else print_plan(found)


@app.command()
@operating("reason", "yes", create=True)
def apply(call: Invocation, card: Card) -> None:
    """Put a card in force from its valid_from on. It never changes afterwards."""
    new = find_card(card)
    found = lint(new)
    _print_findings(found)
    if _errors(found):
        fail(f"{new.name} {new.version} was not applied")
    if call.asks:
        print_plan(call(prices.plan_card, card={"toml": new.text}))
        confirm(f"Apply {new.name} {new.version}, for good?", yes=False)
    applied = call.change(prices.apply_card, card={"toml": new.text})
    if applied["is_new"]:
        note(f"{new.name} {new.version} is applied, in force from {_instant(applied)}")
    else:
        note(f"{new.name} {new.version} was applied before, word for word: nothing changed")
    for each in applied["unpriced"]:
        what = ", ".join(map(repr, each["models"])) or "any model"
        note(
            f"tenant {each['tenant']!r} has no price in {each['currency']} for {what}: its "
            f"requests will be refused; apply a card in {each['currency']}"
        )


def _instant(card: Document) -> str:
    return datetime.fromtimestamp(card["valid_from_ns"] // NS, UTC).isoformat()


def _errors(findings: list[CardFinding]) -> bool:
    return any(finding.level is Severity.ERROR for finding in findings)


def _print_findings(findings: list[CardFinding]) -> None:
    for finding in findings:
        typer.echo(str(finding))


def print_plan(plan: Document) -> None:
    columns = ("tenant", "model", "requests", "charged", "planned", "change", "currency")
    print_documents(plan["rows"], False, columns, right=columns[2:6])
    note(f"{number_of(plan['requests_that_differ'], 'charge')} would cost a different amount")
    for row in plan["unpriced"]:
        note(
            f"{number_of(row['requests'], 'charge')} of {row['model']!r} for {row['tenant']!r} "
            f"left out, {row['charged']} {row['currency']}: no price; such requests would be "
            "refused"
        )
    if others := plan["charges_in_other_currencies"]:
        note(f"{number_of(others, 'charge')} in other currencies left out")
