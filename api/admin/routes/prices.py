"""/admin/api/prices/show and lint: a card of the catalogue, read and checked."""

from fastapi import APIRouter

from api.admin.access import Books
from api.admin.routes.bodies import CardSource
from billing.operations import prices
from billing.reports.documents import Document

router = APIRouter(prefix="/admin/api/prices", tags=["admin: prices"])


@router.post("/show")
def show_card(books: Books, source: CardSource) -> Document:
    """One card, with its TOML."""
    return prices.show_card(books, card=source.model_dump())


@router.post("/lint")
def lint_card(books: Books, source: CardSource) -> list[Document]:
    """Warnings on a card: what can be gamed, loses money or is unclear."""
    return prices.lint_card(books, card=source.model_dump())
