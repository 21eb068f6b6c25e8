"""Days and months (UTC), by which spending is counted. Pure."""

from datetime import UTC, datetime, timedelta

from billing.prices.book import NS

_FORMATS = {"day": "%Y-%m-%d", "month": "%Y-%m"}


def period_of(per: str, at_ns: int) -> str:
    """The `day` or `month` of an instant, such as 2026-11-23 or 2026-11."""
    return datetime.fromtimestamp(at_ns // NS, UTC).strftime(_FORMATS[per])


def period_ns(period: str) -> tuple[int, int]:
    """The beginnings of a day or month and of the next."""
    is_month = len(period) == len("2026-11")
    form = _FORMATS["month" if is_month else "day"]
    first = datetime.strptime(period, form).replace(tzinfo=UTC)
    after = (first + timedelta(days=31)).replace(day=1) if is_month else first + timedelta(days=1)
    return int(first.timestamp()) * NS, int(after.timestamp()) * NS
