"""What a format of a metering service tells: events, calls, and the meaning of answers. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from billing.gate.entries import Entry


@dataclass(frozen=True, slots=True)
class PushEvent:
    """A part of an entry as a service takes it; the service drops an `id` that it has."""

    id: str
    tenant: str
    entry: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request; without `data` it is a GET."""

    url: str
    data: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """`said` is the body as text, cut short."""

    status: int
    body: bytes

    @property
    def said(self) -> str:
        return f"{self.status} {self.body[:200].decode(errors='replace').strip()}".strip()


HAS_IT = ""  # why an event was refused: the service has it already


class Format(Protocol):
    """How a service wants events. No thread, no clock, no socket."""

    url: str
    batch: int  # events in a call

    def knows(self, tenant: str) -> bool:
        """Whether the service has a name for this tenant."""
        ...

    def events(self, entry: Entry) -> list[PushEvent]:
        """None for an entry that the service has no word for, such as a deposit."""
        ...

    def call(self, events: Sequence[PushEvent], token: str) -> Call: ...

    def session(self) -> Call | None:
        """A call whose answer has the token for `call`; None: the secret key itself is it."""
        ...

    def faults(self, answer: Answer, events: Sequence[PushEvent]) -> Mapping[int, str] | None:
        """Why events were refused, by their place; `HAS_IT` is no fault. None: it does not say."""
        ...


def batches(events: Iterable[PushEvent], size: int) -> Iterator[tuple[PushEvent, ...]]:
    left = iter(events)
    while batch := tuple(islice(left, size)):
        yield batch
