"""The interface of a metering service's format: events, calls and the meaning of answers. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from billing.gate.entries import Entry


@dataclass(frozen=True, slots=True)
class PushEvent:
    """A part of an entry as a service's event. The service drops repeated `id`s."""

    id: str
    tenant: str
    entry: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One HTTP request; without `data` it is a GET."""

    url: str
    data: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """`said` is the body as text, truncated."""

    status: int
    body: bytes

    @property
    def said(self) -> str:
        return f"{self.status} {self.body[:200].decode(errors='replace').strip()}".strip()


HAS_IT = ""  # reason of a refusal: the service already has the event


class Format(Protocol):
    """A service's event format. No thread, no clock, no socket.

    What a format does not write, it inherits: it names every tenant, its key is the token, and its
    answers do not say which events were refused.
    """

    url: str
    batch: int  # events in a call

    def knows(self, tenant: str) -> bool:
        """Whether the service has a name for this tenant."""
        return True

    def events(self, entry: Entry) -> list[PushEvent]:
        """The events of an entry; empty if the service has none for it, such as for a deposit."""
        ...

    def call(self, events: Sequence[PushEvent], token: str) -> HttpCall: ...

    def session(self) -> HttpCall | None:
        """A call whose answer contains the token for `call`; None if the secret key itself is the
        token."""
        return None

    def faults(self, answer: HttpAnswer, events: Sequence[PushEvent]) -> Mapping[int, str] | None:
        """Reasons of refused events by index; `HAS_IT` is no fault. None if the answer does not
        say."""
        return None


def batches(events: Iterable[PushEvent], size: int) -> Iterator[tuple[PushEvent, ...]]:
    left = iter(events)
    while batch := tuple(islice(left, size)):
        yield batch
