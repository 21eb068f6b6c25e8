"""Template filters for sizes, counts, durations, times and money. Pure."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from markupsafe import Markup, escape

from api.format import seconds as duration
from api.format import size
from billing.money import format_units


def count(number: float | None) -> str:
    """A whole number in groups of three; "–" if it is not known."""
    return "–" if number is None else f"{number:,.0f}"


def milliseconds(value: float | None) -> str:
    """A duration in milliseconds; "–" if it was not reached."""
    return "–" if value is None else duration(value / 1000)


def span(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


def share(part: float, whole: float) -> str:
    """ "93 %"; "–" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "–"


def hit_mark(hit: int, prompt: int) -> str:
    """The colour of a hit: good from 80 % of the prompt on, a warning below 20 %."""
    return "good" if 5 * hit >= 4 * prompt else "warn" if 5 * hit < prompt else ""


def moment(seconds: float | None) -> str:
    """Unix seconds as "2026-11-21 08:15:03" in UTC.

    The page's script shows it in the reader's chosen time zone.
    """
    if seconds is None:
        return "–"
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return Markup('<time datetime="{}Z">{}</time>').format(text.replace(" ", "T"), text)


def moment_ns(nanoseconds: int | None) -> str:
    return moment(None if nanoseconds is None else nanoseconds / 1e9)


def money(sum_: int | str | None, currency: str | None, places: int = 4) -> str:
    """Units of 1e-12, or a decimal text, rounded and with the currency; the exact sum in a
    title."""
    if sum_ is None:
        return "–"
    exact = format_units(sum_) if isinstance(sum_, int) else sum_
    shown = format_units(sum_, places) if isinstance(sum_, int) else rounded(sum_, places)
    sums = (f"{each} {currency or ''}".strip() for each in (exact, shown))
    return Markup('<span title="{}">{}</span>').format(*sums)


def rounded(text: str | None, places: int = 4) -> str:
    """A decimal text rounded to `places`, or to three digits if it begins with more zeros.

    The exact value belongs in a title.
    """
    if text is None:
        return "–"
    whole, _, fraction = text.partition(".")
    if whole.lstrip("-") == "0":
        places = max(places, len(fraction) - len(fraction.lstrip("0")) + 3)
    return f"{Decimal(text):.{places}f}" if len(fraction) > places else text


def marked(text: str) -> Markup:
    """Text in backticks, as code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(parts)
    )


def short(key: str | bytes | None) -> str:
    """The first digits of a key."""
    text = key.hex() if isinstance(key, bytes) else key
    return text[:12] if text else "–"


_ALL = (size, count, milliseconds, span, share, hit_mark, moment, moment_ns, money, marked, short)
FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    function.__name__: function for function in _ALL
} | {"amount": format_units}
