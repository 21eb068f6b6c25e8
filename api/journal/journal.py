"""The journal: the history of the latest requests, for people who ask why.

A bounded ring of running, finished and refused requests: who asked, where the time went,
which tier served which tokens, why the rest was computed, and the bill's lines. Written where a
request enters and where it settles; read by the admin pages and by `/v1/cache/requests`. It keeps
no prompt and no answer, unless the operator's setting says so. Event loop only; nothing waits.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from api.errors import answer_to
from api.job import Bill, Job, Served
from api.requests.generation import Generation
from billing.keys import Principal
from billing.names import bare_id
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
    REFUSED = "refused"  # after its key was known, before the engine took it


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """Bounds of the journal. 0 requests turns it off."""

    max_requests: int = 2_000
    max_bytes: int = 16 << 20
    keep_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as the client saw it."""

    status: int
    type: str
    code: str | None
    message: str


@dataclass(frozen=True, slots=True)
class Trail:
    """How the request came: its route, and the W3C trace context that the client sent, if any."""

    route: str = ""
    trace_parent: str = ""


NO_TRAIL = Trail()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. `served` and `bill` are None of a refused one, `bill` of a running one."""

    request_id: str
    client_id: str
    tenant: str
    project: str
    key_id: str
    session: str
    model: str
    stream: bool
    num_choices: int
    prompt_tokens: int
    scope: PrefixKey  # the root of its prefixes
    arrived_s: float  # Unix time
    state: State
    trail: Trail = NO_TRAIL
    prompts: "tuple[array[int], ...]" = ()  # token ids, only where the operator keeps them
    served: Served | None = None
    bill: Bill | None = None
    delivered: bool | None = None  # to the last byte
    failure: Failure | None = None
    ended_s: float | None = None

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        size = RECORD_BYTES + sum(4 * len(tokens) for tokens in self.prompts)
        for lookup in self.served.lookups if self.served else ():
            size += RUN_BYTES * len(lookup.runs) + ABSENCE_BYTES * (lookup.absence is not None)
        return size


class Journal:
    """The ring. Invariant: at most `max_requests` records are kept, of at most `max_bytes`; running
    requests are counted by the server's own bounds and are not dropped."""

    def __init__(
        self,
        settings: JournalSettings | None = None,
        *,
        clock_s: Callable[[], float] = time.time,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self.on_end = on_end  # told of each request that finished or was refused
        self.settings = settings or JournalSettings()
        self._clock_s = clock_s
        self._running: dict[str, tuple[RequestRecord, Generation]] = {}
        self._ended: dict[str, RequestRecord] = {}  # in the order of their ends
        self._nbytes = 0

    @property
    def num_records(self) -> int:
        return len(self._running) + len(self._ended)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def restore(self, records: Iterable[RequestRecord]) -> None:
        """Requests that ended in an earlier run, the oldest first; observers saw them then."""
        for record in records:
            self._add(record)

    def begin(
        self,
        job: Job,
        principal: Principal,
        generation: Generation,
        *,
        client_id: str,
        stream: bool,
        trail: Trail = NO_TRAIL,
    ) -> None:
        """The engine has taken the request."""
        record = self._record(job, principal, client_id, stream, State.RUNNING, trail)
        self._running[job.request_id] = record, generation

    def refuse(
        self,
        job: Job,
        principal: Principal,
        error: BaseException,
        *,
        client_id: str,
        stream: bool,
        trail: Trail = NO_TRAIL,
    ) -> None:
        """A limit, the balance or the engine has turned the request away."""
        if not isinstance(error, Exception):
            return  # the client left, or the server stops: nobody was refused
        record = self._record(job, principal, client_id, stream, State.REFUSED, trail)
        self._keep(replace(record, failure=_failure(error), ended_s=self._clock_s()))

    def settle(self, request_id: str, delivered: "Delivered") -> None:
        """The request has ended, and its charge stands."""
        record, _ = self._running.pop(request_id)
        bill = delivered.bill
        self._keep(
            replace(
                record,
                state=State.FINISHED,
                served=_without_content(delivered.served),
                bill=replace(bill, receipt=None) if bill is not None else None,
                delivered=delivered.complete,
                failure=_failure(delivered.error) if delivered.error is not None else None,
                ended_s=self._clock_s(),
            )
        )

    def find(self, name: str, *, tenant: str | None = None) -> RequestRecord | None:
        """The request of this id, as the server, the answer or the client itself names it; of one
        tenant or (None) of any."""
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
        """Every request, the running ones first, then by their end, the latest first."""
        for record, generation in reversed(list(self._running.values())):
            yield _live(record, generation)
        yield from reversed(list(self._ended.values()))

    def _record(
        self,
        job: Job,
        principal: Principal,
        client_id: str,
        stream: bool,
        state: State,
        trail: Trail,
    ) -> RequestRecord:
        return RequestRecord(
            request_id=job.request_id,
            client_id=client_id,
            tenant=principal.tenant,
            project=principal.project,
            key_id=principal.key_id,
            session=job.context.session,
            model=job.model.name,
            stream=stream,
            num_choices=job.num_choices,
            prompt_tokens=job.prompt_tokens,
            scope=job.scope.root(),
            arrived_s=self._clock_s(),
            state=state,
            trail=trail,
            prompts=job.prompts if self.settings.keep_prompts else (),
        )

    def _keep(self, record: RequestRecord) -> None:
        self._add(record)
        self.on_end(record)

    def _add(self, record: RequestRecord) -> None:
        settings = self.settings
        self._ended[record.request_id] = record
        self._nbytes += record.nbytes
        while len(self._ended) > settings.max_requests or self._nbytes > settings.max_bytes:
            oldest = self._ended.pop(next(iter(self._ended)))
            self._nbytes -= oldest.nbytes


def _live(record: RequestRecord, generation: Generation) -> RequestRecord:
    return replace(record, served=_without_content(generation.served()))


def _without_content(served: Served) -> Served:
    """What a request came to, without what anybody wrote or read."""
    return replace(served, transcripts=(), prompt_logprobs=())


def _failure(error: Exception) -> Failure:
    answer = answer_to(error)
    return Failure(answer.status, answer.type, answer.code, answer.message)
