"""Human-readable numbers, and pydantic's errors, for commands, pages and `cachesvc top`. Pure."""

import re

_PYDANTIC = re.compile(
    "^(Value error, |(Input|List|Dictionary|String) (?=should))| after validation"
)


def plain(message: str) -> str:
    """One of pydantic's messages, without the names of its kinds of errors and values."""
    return _PYDANTIC.sub("", message)


def size(num_bytes: float) -> str:
    """`1.4 GiB`, `1020 MiB`: at least three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{_digits(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{_digits(num_bytes)} TiB"


def seconds(duration_s: float) -> str:
    """`340 µs`, `12.3 ms`, `4.20 s`, `3 h`: three digits and the unit that suits."""
    for bound, unit, factor in ((1e-3, "µs", 1e6), (1, "ms", 1e3), (120, "s", 1)):
        if duration_s < bound:
            return f"{_digits(duration_s * factor)} {unit}"
    for bound, unit, factor in ((7200, "min", 1 / 60), (172_800, "h", 1 / 3600)):
        if duration_s < bound:
            return f"{_digits(duration_s * factor)} {unit}"
    return f"{_digits(duration_s / 86400)} d"


def _digits(number: float) -> str:
    """Three significant digits, or all digits before the point; never an exponent."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"


def number_of(number: int, one: str, many: str = "") -> str:
    """`1 block`, `2 blocks`; `many` is an irregular plural."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
