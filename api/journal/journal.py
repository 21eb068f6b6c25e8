"""The journal: a history of recent requests, which explains hits, times and bills.

A bounded ring of running, finished and refused requests. A record holds the tenant, the timeline,
the tokens served by each tier, the reasons of misses and the lines of the bill. It is written at
admission and at settlement, and read by the admin pages and `/v1/cache/requests`. Prompts and
answers are kept only if the operator's setting says so. Event loop only; nothing waits.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from api.errors import answer_to
from api.job import Bill, Job, Served
from api.requests.delivery import Producer
from billing.keys import Principal
from billing.names import bare_id
from engine.promise import Promise
from tiers.blocks.keys import PrefixKey

if TYPE_CHECKING:
    from api.job import Delivered

RECORD_BYTES = 3_000  # of a record with its bill; measured by `tracemalloc` over 1,000 of them
RUN_BYTES = 150
ABSENCE_BYTES = 900


class State(StrEnum):
    """How far a request is."""

    RUNNING = "running"
    FINISHED = "finished"
    REFUSED = "refused"  # after its key was checked, before the engine took it


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """Bounds of the journal. 0 requests turns it off."""

    max_requests: int = 2_000
    max_bytes: int = 16 << 20
    keep_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as sent to the client."""

    status: int
    type: str
    code: str | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. `served` and `bill` are None for a refused request, `bill` for a running one."""

    request_id: str
    client_id: str
    tenant: str
    project: str
    key_id: str
    session: str
    model: str
    stream: bool
    num_choices: int
    prompt_tokens: int | None  # None: its engine has yet to count them
    scope: PrefixKey  # the root of its prefixes
    arrived_s: float  # Unix time
    state: State
    route: str = ""
    trace_parent: str = ""  # the client's W3C trace context
    prompts: "tuple[array[int], ...]" = ()  # token ids, only if the operator keeps them
    served: Served | None = None
    bill: Bill | None = None
    delivered: bool | None = None  # whether the last byte was sent
    failure: Failure | None = None
    ended_s: float | None = None
    promise: Promise | None = None  # what a hit leaves equal where it was served

    @property
    def nbytes(self) -> int:
        """Its approximate size in memory."""
        size = RECORD_BYTES + sum(4 * len(tokens) for tokens in self.prompts)
        for lookup in self.served.lookups if self.served else ():
            size += RUN_BYTES * len(lookup.runs) + ABSENCE_BYTES * (lookup.absence is not None)
        return size


class Journal:
    """The ring.

    Invariant: at most `max_requests` ended records are kept, of at most `max_bytes` in all. Running
    requests are bounded by the server and never dropped.
    """

    def __init__(
        self,
        settings: JournalSettings | None = None,
        *,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self.on_end = on_end  # called with each request that finished or was refused
        self.settings = settings or JournalSettings()
        self._running: dict[str, tuple[RequestRecord, Producer]] = {}
        self._ended: dict[str, RequestRecord] = {}  # ordered by end
        self.nbytes = 0

    @property
    def num_records(self) -> int:
        return len(self._running) + len(self._ended)

    def restore(self, records: Iterable[RequestRecord]) -> None:
        """Loads requests of an earlier run, oldest first, without calling observers again."""
        for record in records:
            self._add(record)

    def record(
        self,
        job: Job,
        principal: Principal,
        *,
        client_id: str,
        route: str = "",
        trace_parent: str = "",
    ) -> RequestRecord:
        """Of a request that arrives now, for `begin` or `refuse`."""
        return RequestRecord(
            request_id=job.request_id,
            client_id=client_id,
            tenant=principal.tenant,
            project=principal.project,
            key_id=principal.key_id,
            session=job.context.session,
            model=job.model.name,
            stream=job.stream,
            num_choices=job.num_choices,
            prompt_tokens=sum(map(len, job.prompts)) or None,
            scope=job.scope.root(),
            arrived_s=time.time(),
            state=State.RUNNING,
            route=route,
            trace_parent=trace_parent,
            prompts=job.prompts if self.settings.keep_prompts else (),
            promise=job.model.promise,
        )

    def begin(self, record: RequestRecord, generation: Producer) -> None:
        """Records that the engine took the request."""
        self._running[record.request_id] = record, generation

    def refuse(self, record: RequestRecord, error: BaseException) -> None:
        """Records that a limit, the balance or the engine refused the request."""
        if isinstance(error, Exception):  # else the client left or the server is stopping
            failure, ended_s = _failure(error), time.time()
            self._keep(replace(record, state=State.REFUSED, failure=failure, ended_s=ended_s))

    def settle(self, request_id: str, delivered: "Delivered") -> None:
        """Records that the request ended and its charge was posted."""
        record, _ = self._running.pop(request_id)
        bill = delivered.bill
        self._keep(
            replace(
                record,
                state=State.FINISHED,
                prompt_tokens=record.prompt_tokens or (bill and bill.usage.prompt) or None,
                served=_without_content(delivered.served),
                bill=replace(bill, receipt=None) if bill and bill.receipt else bill,
                delivered=delivered.complete,
                failure=_failure(delivered.error) if delivered.error is not None else None,
                ended_s=time.time(),
            )
        )

    def find(self, name: str, *, tenant: str | None = None) -> RequestRecord | None:
        """The request with this id: the server's, the answer's or the client's own.

        `tenant` limits the search to one tenant.
        """
        name = bare_id(name)
        known = self._ended.get(name)
        if name in self._running:
            known = _live(*self._running[name])
        candidates = [known] if known is not None else self.newest()
        for record in candidates:
            if name in (record.request_id, record.client_id) and tenant in (None, record.tenant):
                return record
        return None

    def newest(self) -> Iterator[RequestRecord]:
        """Every request: running ones first, then the ended ones, latest first."""
        for record, generation in reversed(list(self._running.values())):
            yield _live(record, generation)
        yield from reversed(list(self._ended.values()))

    def _keep(self, record: RequestRecord) -> None:
        self._add(record)
        self.on_end(record)

    def _add(self, record: RequestRecord) -> None:
        settings = self.settings
        self._ended[record.request_id] = record
        self.nbytes += record.nbytes
        while len(self._ended) > settings.max_requests or self.nbytes > settings.max_bytes:
            oldest = self._ended.pop(next(iter(self._ended)))
            self.nbytes -= oldest.nbytes


def _live(record: RequestRecord, generation: Producer) -> RequestRecord:
    return replace(record, served=_without_content(generation.served()))


def _without_content(served: Served) -> Served:
    """A request's result without the text of prompt and answer."""
    if not served.transcripts and not any(served.prompt_logprobs):
        return served
    return replace(served, transcripts=(), prompt_logprobs=())


def _failure(error: Exception) -> Failure:
    answer = answer_to(error)
    return Failure(answer.status, answer.type, answer.code, answer.message)
