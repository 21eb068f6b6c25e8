"""Rate cards: shown, linted, tried on real usage, and put in force.

A card is given as `{"toml": TEXT}` or `{"name": NAME}`, with `version` for an applied one. It is
never a path, because these calls also come over the network.
"""

import time
from collections.abc import Mapping
from typing import Annotated, Any

from billing.errors import PriceError, UnknownCard
from billing.operations.arguments import Argument, Name, Why
from billing.operations.books import Books
from billing.prices.book import NS, RateCard
from billing.prices.cards import parse_card, refuse_removed, shipped_cards
from billing.prices.lint import Severity, lint
from billing.reports.documents import Document, card_document, finding_document, plan_document

CardSource = Mapping[str, Any]


def applied_cards(books: Books) -> list[Document]:
    """Applied cards, oldest first."""
    return [card_document(card) for card in books.accounts.book.cards]


def show_card(books: Books, *, card: CardSource) -> Document:
    """One card, with its TOML."""
    found = _card(books, card)
    return card_document(found) | {"toml": found.text}


def lint_card(books: Books, *, card: CardSource) -> list[Document]:
    """Warnings on a card: what can be gamed, loses money or is unclear."""
    return [finding_document(finding) for finding in lint(_card(books, card))]


def plan_card(
    books: Books,
    *,
    card: CardSource,
    days: Annotated[int, Argument(ge=1, le=3660)] = 30,
    tenant: Name | None = None,
) -> Document:
    """What the last days' real usage would have cost under a card. Changes nothing."""
    books.accounts.expect(tenant)
    from billing.proof import rerate  # imports the database

    tried = _card(books, card)
    since_ns = max(0, time.time_ns() - days * 86_400 * NS)
    pricing = rerate.under_card(tried)
    return plan_document(rerate.rerate(books.store, pricing, since_ns=since_ns, tenant=tenant))


def apply_card(books: Books, *, card: CardSource, by: str, why: Why) -> Document:
    """Put a card in force from its `valid_from` on. An applied card never changes.

    `is_new` is false if the same card was applied before. `unpriced` are the tenants that have no
    price once it is in force.
    """
    new = _card(books, card)
    findings = lint(new)
    errors = [finding for finding in findings if finding.level is Severity.ERROR]
    if errors:
        raise PriceError(f"{new.name} {new.version} was not applied: {errors[0]}")
    is_new = books.accounts.apply_card(new, by=by, reason=why)
    warnings = [finding_document(finding) for finding in findings]
    unpriced = _unpriced(books, max(time.time_ns(), new.valid_from_ns))
    return card_document(new) | {"findings": warnings, "is_new": is_new, "unpriced": unpriced}


def _unpriced(books: Books, at_ns: int) -> list[Document]:
    """Tenants without a price at an instant, each with those of its models of the last month that
    no card has. No models: it has no card at all."""
    from billing.reports.usage import Unit, parse_query, report  # imports the database

    used: dict[str, list[str]] = {}
    for each in report(books.store, parse_query(since="30d", split="model"), Unit.ALL):
        used.setdefault(each.tenant, []).append(each.part)
    found, book = [], books.accounts.book
    for tenant in books.accounts.tenants():
        pair = tenant.currency, tenant.tenant
        cards = book.in_force(at_ns, *pair), book.in_force(at_ns, tenant.currency)
        missing = [
            model
            for model in used.get(tenant.tenant, ())
            if not any(card and card.price_of(model) for card in cards)
        ]
        if missing or not any(cards):
            models = missing if any(cards) else []
            found.append({"tenant": pair[1], "currency": pair[0], "models": models})
    return found


def _card(books: Books, source: CardSource) -> RateCard:
    toml, name, version = (source.get(field) for field in ("toml", "name", "version"))
    if (toml is None) == (name is None):
        raise PriceError("give a card either by `toml` or by `name`")
    if toml is not None:
        new = parse_card(toml)
        return next((card for card in books.accounts.book.cards if card.text == new.text), new)
    for card in reversed(books.accounts.book.cards):
        if card.name == name and version in (None, card.version):
            return card
    text = shipped_cards().get(name or "") if version is None else None
    if text is None:
        refuse_removed(name or "")
        wanted = " ".join(filter(None, (name, version)))
        raise UnknownCard(f"no rate card '{wanted}' was applied or ships with the program")
    return parse_card(text, name or "")
