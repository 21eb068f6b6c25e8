"""`cachesvc prices`: check rate cards, try them on real usage, put them in force."""

import sys
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from billing import plan as plans
from billing.cards import find_card
from billing.errors import BillingError
from billing.lint import Finding, Level, lint
from billing.money import format_units, rate_per_million
from billing.prices import NS, RateCard, Rates
from cachesvc.cli.books import DatabaseUrl, DataDir, Reason, TenantOption, actor, books
from cachesvc.cli.render import AsJson, fail, note, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="Lint, show, plan and apply rate cards")

Card = Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped card")]
_RATES = ("hit_device", "hit_host", "hit_disk", "hit_remote", "miss", "output")
_EXTRAS = ("cache_write", "storage")


@app.command("lint")
def lint_card(card: Card, json: AsJson = False) -> None:
    """Refuse a card that can be gamed, loses money against its stated cost, or is unclear."""
    found = lint(_card(card))
    if json:
        print_json([_finding(finding) for finding in found])
    else:
        _print_findings(found)
        note("no objection" if not found else f"{len(found)} findings")
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
        print_json([card_json(found) for found in cards])
        return
    for found in cards:
        since = datetime.fromtimestamp(found.valid_from_ns // NS, UTC).isoformat()
        title = f"{found.name} {found.version}, {found.currency} per million, from {since}"
        print_table(("model", "window", *_RATES, *_EXTRAS), _rows(found), title=title, right=_RATES)


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
        pricing = plans.under_card(find_card(card))
        since_ns = time.time_ns() - days * 86_400 * NS
        found = plans.rerate(open_books.store, pricing, since_ns=since_ns, tenant=tenant)
        if json:
            print_json(plan_json(found))
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
        open_books.accounts.apply_card(new, by=actor(), reason=reason)
        note(f"{new.name} {new.version} is applied")


@app.command()
def diff(before: Card, after: Card, json: AsJson = False) -> None:
    """Show what differs between two cards."""
    old, new = _flat(_card(before)), _flat(_card(after))
    changes = [(name, old.get(name, "-"), new.get(name, "-")) for name in sorted(old | new)]
    changes = [change for change in changes if change[1] != change[2]]
    if json:
        print_json([{"field": f, "before": b, "after": a} for f, b, a in changes])
    else:
        print_table(("field", "before", "after"), changes, right=("before", "after"))


def _card(name_or_path: str) -> RateCard:
    try:
        return find_card(name_or_path)
    except BillingError as error:
        fail(str(error))


def _errors(findings: list[Finding]) -> bool:
    return any(finding.level is Level.ERROR for finding in findings)


def _print_findings(findings: list[Finding]) -> None:
    for finding in findings:
        typer.echo(str(finding))


def _finding(finding: Finding) -> dict[str, str]:
    return {
        "level": finding.level,
        "rule": finding.rule,
        "where": finding.where,
        "message": finding.message,
    }


def _price(rates: Rates, name: str) -> str:
    units = getattr(rates, name)
    return "-" if units is None else rate_per_million(units)


def _rows(card: RateCard) -> list[tuple[str, ...]]:
    return [
        (price.pattern, window, *(_price(rates, name) for name in (*_RATES, *_EXTRAS)))
        for price in card.models
        for window, rates in price.rates.items()
    ]


def _flat(card: RateCard) -> dict[str, str]:
    flat = {
        f"{row[0]} {row[1]} {name}": value
        for row in _rows(card)
        for name, value in zip((*_RATES, *_EXTRAS), row[2:], strict=True)
    }
    return flat | {
        "currency": card.currency,
        "version": card.version,
        "minimum_cached_tokens": str(card.minimum_cached_tokens),
        "valid_from_ns": str(card.valid_from_ns),
    }


def card_json(card: RateCard) -> dict[str, Any]:
    """A card as JSON values; prices are decimal texts per million tokens."""
    return {
        "name": card.name,
        "version": card.version,
        "currency": card.currency,
        "valid_from_ns": card.valid_from_ns,
        "time_zone": card.zone.key,
        "minimum_cached_tokens": card.minimum_cached_tokens,
        "models": [
            {
                "match": price.pattern,
                "window": window,
                **{name: _price(rates, name) for name in (*_RATES, *_EXTRAS)},
            }
            for price in card.models
            for window, rates in price.rates.items()
        ],
    }


def plan_json(plan: plans.Plan) -> dict[str, Any]:
    return {
        "requests_that_differ": plan.num_differing,
        "examples": plan.differing,
        "rows": [
            {
                "tenant": row.tenant,
                "model": row.model,
                "currency": row.currency,
                "requests": row.requests,
                "charged": format_units(row.charged),
                "planned": format_units(row.planned),
                "change": format_units(row.change),
            }
            for row in plan.rows
        ],
    }


def print_plan(plan: plans.Plan) -> None:
    """A plan as a table."""
    columns = ("tenant", "model", "requests", "charged", "planned", "change", "currency")
    print_table(
        columns,
        [
            (
                row.tenant,
                row.model,
                row.requests,
                format_units(row.charged),
                format_units(row.planned),
                format_units(row.change),
                row.currency,
            )
            for row in plan.rows
        ],
        right=columns[2:6],
    )
    note(f"{plan.num_differing} requests would cost otherwise")
