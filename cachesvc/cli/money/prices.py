"""`cachesvc prices`: check rate cards, try them on real usage, put them in force."""

import sys
import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from api.format import number_of
from billing.errors import BillingError
from billing.money import format_units
from billing.prices.book import NS, RateCard
from billing.prices.cards import find_card
from billing.prices.lint import CardFinding, Severity, lint
from billing.proof import rerate as plans
from billing.reports.documents import (
    EXTRAS,
    RATES,
    card_document,
    differences,
    finding_document,
    plan_document,
    price_text,
)
from cachesvc.cli.money.books import DatabaseUrl, DataDir, Reason, TenantOption, actor, books
from cachesvc.cli.render import AsJson, fail, note, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="Lint, show, plan and apply rate cards")

Card = Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped card")]


@app.command("lint")
def lint_card(card: Card, json: AsJson = False) -> None:
    """Refuse a card that can be gamed, loses money against its stated cost, or is unclear."""
    found = lint(_card(card))
    if json:
        print_json([finding_document(finding) for finding in found])
    else:
        _print_findings(found)
        note("no objection" if not found else number_of(len(found), "finding"))
    if _errors(found):
        sys.exit(1)


@app.command()
def show(
    card: Annotated[str | None, typer.Argument(help="A card  [all that were applied]")] = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Show the prices of a card, or of those that were applied."""
    if card is not None:
        cards: tuple[RateCard, ...] = (_card(card),)
    else:
        with books(data_dir, database) as open_books:
            cards = open_books.accounts.book.cards
    if json:
        print_json([card_document(found) for found in cards])
        return
    for found in cards:
        title = f"{found.name} {found.version}, {found.currency} per million, from "
        title += _instant(found)
        names = [name.replace("hit_", "") for name in (*RATES, *EXTRAS)]
        columns = ("model", "window", *names)
        spare = ("cache_write", "storage", "remote")
        print_table(columns, _rows(found), title=title, right=names, spare=spare)


@app.command()
def plan(
    card: Card,
    days: Annotated[int, typer.Option(min=1, help="How many days of usage")] = 30,
    tenant: TenantOption = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """What the last days' real usage would have cost under this card. Changes nothing."""
    with books(data_dir, database) as open_books:
        open_books.accounts.expect(tenant)
        pricing = plans.under_card(find_card(card))
        since_ns = max(0, time.time_ns() - days * 86_400 * NS)
        found = plans.rerate(open_books.store, pricing, since_ns=since_ns, tenant=tenant)
        if json:
            print_json(plan_document(found))
        else:
            print_plan(found)


@app.command()
def apply(
    card: Card,
    reason: Reason = "",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Put a card in force from its valid_from on. It never changes afterwards."""
    new = _card(card)
    found = lint(new)
    _print_findings(found)
    if _errors(found):
        fail(f"{new.name} {new.version} was not applied")
    with books(data_dir, database, create=True) as open_books:
        if open_books.accounts.apply_card(new, by=actor(), reason=reason):
            note(f"{new.name} {new.version} is applied, in force from {_instant(new)}")
        else:
            note(f"{new.name} {new.version} was applied before, word for word: nothing changed")


@app.command()
def diff(before: Card, after: Card, json: AsJson = False) -> None:
    """Show what differs between two cards."""
    changes = differences(_card(before), _card(after))
    if json:
        print_json(changes)
    else:
        columns = ("field", "before", "after")
        rows = [[change[name] for name in columns] for change in changes]
        print_table(columns, rows, right=("before", "after"))


def _card(name_or_path: str) -> RateCard:
    try:
        return find_card(name_or_path)
    except BillingError as error:
        fail(str(error))


def _instant(card: RateCard) -> str:
    return datetime.fromtimestamp(card.valid_from_ns // NS, UTC).isoformat()


def _errors(findings: list[CardFinding]) -> bool:
    return any(finding.level is Severity.ERROR for finding in findings)


def _print_findings(findings: list[CardFinding]) -> None:
    for finding in findings:
        typer.echo(str(finding))


def _rows(card: RateCard) -> list[tuple[str, ...]]:
    return [
        (price.pattern, window, *(price_text(rates, name) for name in (*RATES, *EXTRAS)))
        for price in card.models
        for window, rates in price.rates.items()
    ]


def print_plan(plan: plans.Plan) -> None:
    """A plan as a table."""
    columns = ("tenant", "model", "charges", "charged", "planned", "change", "currency")
    print_table(
        columns,
        [
            (
                row.tenant,
                row.model,
                row.charges,
                format_units(row.charged),
                format_units(row.planned),
                format_units(row.change),
                row.currency,
            )
            for row in plan.rows
        ],
        right=columns[2:6],
    )
    note(f"{number_of(plan.num_differing, 'charge')} would cost otherwise")
    for row in plan.unpriced:
        note(
            f"{number_of(row.charges, 'charge')} of {row.model!r} for {row.tenant!r} left out, "
            f"{format_units(row.charged)} {row.currency}: no price; such requests would be refused"
        )
    if plan.num_other_currency:
        note(f"{number_of(plan.num_other_currency, 'charge')} in other currencies left out")
