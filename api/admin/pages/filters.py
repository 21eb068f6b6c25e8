"""What a page of requests or of money is asked for: a tenant, a key, a model and a span of time.

One form (`data.filters` in the templates) and one query, for pages and JSON alike.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime, timedelta
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Depends, Query

from api.errors import InvalidRequest
from api.journal.journal import Journal, RequestRecord

Filter = Annotated[str, Query(max_length=128)]
Before = Annotated[int | None, Query(ge=1, lt=1 << 63)]  # the number of the oldest entry seen
DAY_LETTERS = len("2026-11-28")
MAX_DAYS = 366  # of a page of money


@dataclass(frozen=True, slots=True)
class Chosen:
    """The filters as they stand in the address. Empty takes all. Times are UTC."""

    tenant: Filter = ""
    key: Filter = ""
    model: Filter = ""
    since: Filter = ""  # a day, or a minute such as 2026-11-28T08:15; the first
    until: Filter = ""  # the last, all of it included

    def __bool__(self) -> bool:
        return any(self.given.values())

    @property
    def given(self) -> dict[str, str]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def query(self) -> str:
        """The filters in use, for a link."""
        return urlencode({name: text for name, text in self.given.items() if text})

    def takes(self, tenant: str, key: str, model: str) -> bool:
        wanted = (self.tenant, self.key, self.model)
        return all(
            each in ("", found) for each, found in zip(wanted, (tenant, key, model), strict=True)
        )

    def span_s(self) -> tuple[float, float]:
        """Unix seconds; the end is exclusive. Raises InvalidRequest."""
        since, until = self._time("since"), self._time("until")
        whole = timedelta(days=1) if len(self.until) == DAY_LETTERS else timedelta(minutes=1)
        return (
            since.timestamp() if since else 0.0,
            (until + whole).timestamp() if until else float("inf"),
        )

    def days(self, usual: int) -> tuple[date, date]:
        """The first and the last day; `usual` many up to today if none is given.

        Raises InvalidRequest for a time of day, because money is summed by whole days.
        """
        for name in ("since", "until"):
            if len(getattr(self, name)) > DAY_LETTERS:
                raise InvalidRequest("Money is by whole days of UTC: write 2026-11-28.", param=name)
        since, until = self._time("since"), self._time("until")
        last = until.date() if until else datetime.now(UTC).date()
        first = since.date() if since else last - timedelta(days=usual - 1)
        if not 0 <= (last - first).days < MAX_DAYS:
            raise InvalidRequest(f"From {first} to {last} is not 1 to {MAX_DAYS} days.")
        return first, last

    def requests(self, journal: Journal, *, state: str = "", text: str = "") -> list[RequestRecord]:
        """The requests that are remembered and fit, the latest arrival first. `state` is a state or
        an outcome, `text` a part of an id or a name."""
        first_s, end_s = self.span_s()
        found = [
            record
            for record in journal.newest()
            if self.takes(record.tenant, record.key_id, record.model)
            and first_s <= record.arrived_s < end_s
            and state in ("", *_states(record))
            and (not text or any(text in name for name in _names(record)))
        ]
        return sorted(found, key=lambda record: -record.arrived_s)

    def _time(self, name: str) -> datetime | None:
        text: str = getattr(self, name)
        try:
            return datetime.fromisoformat(text).replace(tzinfo=UTC) if text else None
        except ValueError:
            raise InvalidRequest(
                f"{text!r} is no time; write 2026-11-28 or 2026-11-28T08:15, in UTC.", param=name
            ) from None


Asked = Annotated[Chosen, Depends()]


def choices_of(records: Iterable[RequestRecord]) -> dict[str, set[str]]:
    """What the form offers for each name: all that these requests have."""
    known = [(each.tenant, each.key_id, each.model) for each in records]
    columns = map(set, zip(*known, strict=True)) if known else (set[str]() for _ in range(3))
    return dict(zip(("tenant", "key", "model"), columns, strict=True))


def _states(record: RequestRecord) -> Iterator[str]:
    yield record.state
    if record.served is not None and record.ended_s:
        yield record.served.outcome


def _names(record: RequestRecord) -> tuple[str, ...]:
    return record.request_id, record.client_id, record.key_id, record.session, record.model
