"""/admin/api/prices: rate cards linted, tried on real usage, compared, and put in force.

Only `apply` changes anything. The operations themselves are in `billing.operations.prices`.
"""

from fastapi import APIRouter, Request

from api.admin.access import MayChange, MayRead
from api.admin.parts import books_of, found
from api.admin.routes.bodies import ApplyCard, CardSource, DiffBody, PlanBody
from billing.operations import prices
from billing.prices.cards import parse_card, shipped_cards
from billing.reports.documents import Document, card_document

router = APIRouter(prefix="/admin/api/prices", tags=["admin: prices"])


@router.get("")
def applied_cards(request: Request, _: MayRead) -> list[Document]:
    """The cards that were applied, oldest first."""
    return prices.applied_cards(books_of(request))


@router.get("/shipped")
def shipped(_: MayRead) -> list[Document]:
    """The cards that come with the program, with their TOML to start from."""
    return [
        card_document(parse_card(text, name)) | {"file": name, "toml": text}
        for name, text in sorted(shipped_cards().items())
    ]


@router.post("/show")
def show_card(request: Request, source: CardSource, _: MayRead) -> Document:
    """One card, with its TOML."""
    return prices.show_card(books_of(request), card=source.model_dump())


@router.post("/lint")
def lint_card(request: Request, source: CardSource, _: MayRead) -> list[Document]:
    """What of a card can be gamed, loses money, or is unclear."""
    return prices.lint_card(books_of(request), card=source.model_dump())


@router.post("/plan")
def plan_card(request: Request, body: PlanBody, _: MayRead) -> Document:
    """What the last days' real usage would have cost under a card. Changes nothing."""
    with found():
        return prices.plan_card(books_of(request), **body.model_dump())


@router.post("/diff")
def diff_cards(request: Request, body: DiffBody, _: MayRead) -> list[Document]:
    """What differs between two cards."""
    return prices.diff_cards(books_of(request), **body.model_dump())


@router.post("/apply")
def apply_card(request: Request, body: ApplyCard, by: MayChange) -> Document:
    """Put a card in force from its `valid_from` on. It never changes afterwards."""
    return prices.apply_card(books_of(request), **body.model_dump(), by=by.name)
