"""What arguments of operations are and may be, in words and bounds.

The signature of an operation is the only place that says it. The JSON routes and their schema come
from there (`api.admin.routes.derived`). Bounds are checked where an argument comes over the wire.
"""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Argument:
    """Words and bounds of an argument, by pydantic's names. Commands start without pydantic."""

    description: str | None = None
    min_length: int | None = None  # of a text or a list
    max_length: int | None = None
    pattern: str | None = None
    ge: int | None = None
    gt: int | None = None
    le: int | None = None
    lt: int | None = None


def text(most: int, description: str | None = None, *, least: int = 0) -> Argument:
    """A text of `least` to `most` characters."""
    return Argument(description, min_length=least or None, max_length=most)


Why = Annotated[str, text(500, "Kept in the audit log", least=1)]
Name = Annotated[str, text(64, least=1)]
Text = Annotated[str, text(200)]
Amount = Annotated[str, text(60, "A decimal, such as 12.50")]
Reference = Annotated[str, text(200, least=1)]

OfTenant = Annotated[str | None, Argument("Only this tenant")]
Days = Annotated[int, Argument("How many days back", ge=1, le=3660)]
Limit = Annotated[int, Argument("At most so many, newest first", ge=1, le=1000)]
Since = Annotated[
    str | None, Argument("First day: 2026-11-01, today, yesterday, or 7d for a week back")
]
Until = Annotated[str | None, Argument("Last day, written alike")]
Timezone = Annotated[str, Argument("Where days begin, such as Asia/Shanghai")]
Breakdown = Annotated[str | None, text(80, "By model, project, key, session, user or tag:NAME")]
Month = Annotated[str, Argument("Such as 2026-11", pattern=r"^\d{4}-(0[1-9]|1[0-2])$")]
