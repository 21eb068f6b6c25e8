"""The values of forms and filters: bounded text, reasons, and changes that may fail."""

from collections.abc import Callable
from typing import Annotated

from fastapi import Form, Query, Request

from api.admin.parts import books_of
from api.errors import ApiError, InvalidRequest
from billing.errors import BillingError
from billing.operations.books import Books

Text = Annotated[str, Form(max_length=500)]
Filter = Annotated[str, Query(max_length=128)]
Before = Annotated[
    int | None, Query(ge=1, lt=1 << 63)
]  # the number of the oldest entry already seen


def reason_in(why: str) -> str:
    """The reason for a change. Raises InvalidRequest if it is empty."""
    if not any(map(str.isalnum, why)):
        raise InvalidRequest("Say why; the audit log keeps it. Nothing was changed.")
    return why.strip()


def names_in(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def tried(request: Request, change: Callable[[Books], object]) -> str:
    """Applies a change to the books. Returns the error's text, or "" on success. Blocks."""
    try:
        change(books_of(request))
    except (ApiError, BillingError) as error:
        return str(error)
    return ""


def count_in(text: str) -> int | None:
    """A whole number; None for an empty field. Raises InvalidRequest for anything else."""
    typed = text.strip().replace(",", "").replace("\u202f", "").replace(" ", "")
    if not typed:
        return None
    if not (typed.isascii() and typed.isdigit()):
        raise InvalidRequest(f"{text.strip()!r} is not a whole number. Nothing was changed.")
    return int(typed)
