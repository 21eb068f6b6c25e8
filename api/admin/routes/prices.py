"""/admin/api/prices: lint rate cards, try them on real usage, and put them in force.

Only `apply` changes anything. The operations themselves are in `billing.operations.prices`.
"""

from fastapi import APIRouter

from api.admin.access import Books, MayChange
from api.admin.routes.bodies import ApplyCard, CardSource, PlanBody
from billing.operations import prices
from billing.reports.documents import Document

router = APIRouter(prefix="/admin/api/prices", tags=["admin: prices"])


@router.get("")
def applied_cards(books: Books) -> list[Document]:
    """Applied cards, oldest first."""
    return prices.applied_cards(books)


@router.post("/show")
def show_card(books: Books, source: CardSource) -> Document:
    """One card, with its TOML."""
    return prices.show_card(books, card=source.model_dump())


@router.post("/lint")
def lint_card(books: Books, source: CardSource) -> list[Document]:
    """Warnings on a card: what can be gamed, loses money or is unclear."""
    return prices.lint_card(books, card=source.model_dump())


@router.post("/plan")
def plan_card(books: Books, body: PlanBody) -> Document:
    """What the last days' real usage would have cost under a card. Changes nothing."""
    return prices.plan_card(books, **body.model_dump())


@router.post("/apply")
def apply_card(by: MayChange, books: Books, body: ApplyCard) -> Document:
    """Put a card in force from its `valid_from` on. An applied card never changes."""
    return prices.apply_card(books, **body.model_dump(), by=by.name)
