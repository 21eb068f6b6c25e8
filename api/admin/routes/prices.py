"""/admin/api/prices: rate cards linted, tried on real usage, compared, and put in force.

The same operations and documents as `cachesvc prices`. Only `apply` changes anything.
"""

import time
from typing import Any

from fastapi import APIRouter, Request

from api.admin.access import MayChange, MayRead
from api.admin.parts import Books, books_of
from api.admin.routes.bodies import ApplyCard, CardSource, DiffBody, PlanBody
from api.errors import InvalidRequest, RecordNotFound
from billing.prices.book import NS, RateCard
from billing.prices.cards import parse_card, shipped_cards
from billing.prices.lint import Severity, lint
from billing.proof import rerate as plan
from billing.reports.documents import (
    Document,
    card_document,
    differences,
    finding_document,
    plan_document,
)

router = APIRouter(prefix="/admin/api/prices", tags=["admin: prices"])


@router.get("")
def applied(request: Request, _: MayRead) -> list[Document]:
    """The cards that were applied, oldest first."""
    return [card_document(card) for card in books_of(request).accounts.book.cards]


@router.get("/shipped")
def shipped(_: MayRead) -> list[Document]:
    """The cards that come with the program, with their TOML to start from."""
    return [
        card_document(parse_card(text, name)) | {"file": name, "toml": text}
        for name, text in sorted(shipped_cards().items())
    ]


@router.post("/show")
def show(request: Request, source: CardSource, _: MayRead) -> Document:
    """One card, with its TOML."""
    card = _card(books_of(request), source)
    return card_document(card) | {"toml": card.text}


@router.post("/lint")
def lint_card(request: Request, source: CardSource, _: MayRead) -> list[Document]:
    """What of a card can be gamed, loses money, or is unclear."""
    return [finding_document(finding) for finding in lint(_card(books_of(request), source))]


@router.post("/plan")
def plan_card(request: Request, body: PlanBody, _: MayRead) -> Document:
    """What the last days' real usage would have cost under a card. Changes nothing."""
    books = books_of(request)
    pricing = plan.under_card(_card(books, body.card))
    since_ns = max(0, time.time_ns() - body.days * 86_400 * NS)
    return plan_document(plan.rerate(books.store, pricing, since_ns=since_ns, tenant=body.tenant))


@router.post("/diff")
def diff(request: Request, body: DiffBody, _: MayRead) -> list[Document]:
    """What differs between two cards."""
    books = books_of(request)
    return differences(_card(books, body.before), _card(books, body.after))


@router.post("/apply")
def apply(request: Request, body: ApplyCard, by: MayChange) -> Document:
    """Put a card in force from its `valid_from` on. It never changes afterwards."""
    books = books_of(request)
    card = _card(books, body.card)
    findings = lint(card)
    errors = [finding for finding in findings if finding.level is Severity.ERROR]
    if errors:
        raise InvalidRequest(f"{card.name} {card.version} was not applied: {errors[0]}")
    books.accounts.apply_card(card, by=by.name, reason=body.why)
    warnings: list[Any] = [finding_document(finding) for finding in findings]
    return card_document(card) | {"findings": warnings}


def _card(books: Books, source: CardSource) -> RateCard:
    """The card meant: a path is never one, for these bodies come from the network."""
    if (source.toml is None) == (source.name is None):
        raise InvalidRequest("A card is given by `toml` or by `name`, and by one of them.")
    if source.toml is not None:
        return parse_card(source.toml)
    for card in reversed(books.accounts.book.cards):
        if card.name == source.name and source.version in (None, card.version):
            return card
    text = shipped_cards().get(source.name or "") if source.version is None else None
    if text is None:
        wanted = " ".join(filter(None, (source.name, source.version)))
        raise RecordNotFound(f"no rate card '{wanted}' was applied or ships with the program")
    return parse_card(text, source.name or "")
