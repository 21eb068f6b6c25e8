"""The values of forms and filters: bounded text, reasons, and changes that may fail."""

from collections.abc import Callable
from typing import Annotated, Final, TypeVar

from fastapi import Form, Query, Request

from api.admin.parts import books_of
from api.errors import ApiError, InvalidRequest
from billing.errors import BillingError
from billing.operations.books import Books

Made = TypeVar("Made")
Text = Annotated[str, Form(max_length=500)]
Filter = Annotated[str, Query(max_length=128)]
Before = Annotated[
    int | None, Query(ge=1, lt=1 << 63)
]  # the number of the oldest entry already seen

DAY_S: Final = 86_400
MAX_DAYS: Final = 3660


def reason_in(why: str) -> str:
    """The reason for a change. Raises InvalidRequest if it is empty."""
    if not any(map(str.isalnum, why)):
        raise InvalidRequest("Say why; the audit log keeps it. Nothing was changed.")
    return why.strip()


def names_in(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def tried(request: Request, change: Callable[[Books], Made]) -> tuple[str, Made | None]:
    """Applies a change to the books. Returns the error's text, or "" and what the change returned.
    Blocks."""
    try:
        return "", change(books_of(request))
    except (ApiError, BillingError) as error:
        return str(error), None


def seconds_in(days: str) -> int:
    """The seconds of a number of days. Raises InvalidRequest."""
    if not days.isdecimal() or len(days) > 9 or not 0 < int(days) <= MAX_DAYS:
        raise InvalidRequest(f"{days!r} is not a number of days from 1 to {MAX_DAYS}")
    return int(days) * DAY_S


def count_in(text: str) -> int | None:
    """A whole number; None for an empty field. Raises InvalidRequest for anything else."""
    typed = text.strip().replace(",", "").replace("\u202f", "").replace(" ", "")
    if not typed:
        return None
    if not (typed.isascii() and typed.isdigit()):
        raise InvalidRequest(f"{text.strip()!r} is not a whole number. Nothing was changed.")
    return int(typed)
