"""Admission of a request: from a checked body to the start of its delivery.

    Job ─► claim ─► place ─► permit (limits) ─► charge (hold) ─► generation (engine) ─► Delivery

Each step pushes its cleanup on one `AsyncExitStack`, which unwinds when a step refuses or when the
delivery has ended. A cleanup does nothing if nothing is left to clean up: a settled charge is not
voided, a stored answer keeps its claim, and a finished generation is not aborted.
"""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import NoReturn

from fastapi import Request
from starlette.responses import Response

from api.access.rate_limits import Permit
from api.collaborators import Collaborators
from api.context import Arrival, RequestLog
from api.job import Asked, Delivered, Job, Served
from api.requests.delivery import Delivery, DeliveryResponse, Producer
from api.requests.generation import Generation
from api.requests.idempotency import claim, replayed
from api.requests.metering import LedgerCharge
from api.requests.publishing import check_publishable
from api.requests.turns import assistant_message
from api.shapes.answer import WireFormat
from api.shapes.schemas import Extension
from api.shapes.usage import found_of, timings_ms
from billing.gate.outcomes import Outcome
from billing.idempotency import FirstAnswer
from billing.keys import Principal
from billing.usage import EMPTY, HIT_CLASSES
from engine.bounds import check_params


def asked_for(request: Request, extension: Extension) -> Asked:
    """The requested vendor parts, from the body's `cachesvc` or the header X-Cachesvc."""
    words = {word.strip() for word in request.headers.get("x-cachesvc", "").lower().split(",")}
    return Asked(
        details=bool(extension.details) or "details" in words,
        receipt=bool(extension.receipt) or "receipt" in words,
    )


async def deliver(
    arrival: Arrival,
    job: Job,
    extension: Extension,
    wire_format: WireFormat,
    produce: Callable[[Job, LedgerCharge], Producer] | None = None,
) -> Response:
    """Admits the job and returns the response that will carry its answer, or a stored answer.

    `produce` makes the answer; None: the engine here does.

    All that the request acquires is pushed on one stack. A refusal unwinds it here. After
    admission, `_Ending` unwinds it after the last byte.
    """
    check_params(job.params, job.model.vocab_size)
    request, principal, wire, log = arrival.request, arrival.principal, arrival.wire, arrival.log
    publish, parts = None, wire.inference.engine_of(job.model)
    if extension.publish:
        publish = check_publishable(job, parts.publish)
    key, body = arrival.names.idempotency_key, (request.scope["path"], arrival.raw)
    claimed = await claim(wire.books.replays, key, body, principal, job)
    if isinstance(claimed, FirstAnswer):
        log.add(replay_of=claimed.request_id)
        return replayed(claimed, stream=job.stream)
    ending = _Ending(log, wire, job, principal, request)
    async with AsyncExitStack() as held:
        held.push(ending.refused)
        if claimed is not None:
            held.push_async_callback(claimed.close)
        user = wire.access.limits.user_of(principal, job.context.user)
        if user:
            job = replace(job, user=user)
        parts.queue.check_wait(job.share, job.prompt_tokens)
        places = max(1, len(job.prompts))  # the prompts of a relayed body are not read
        parts.queue.enter(job.share, places)
        held.callback(parts.queue.leave, job.share, places)
        wire.books.meter.check()
        permit = await wire.access.limits.admit(principal, user)
        held.push_async_callback(ending.leave, permit)
        if job.source is not None:
            compiling = partial(parts.grammars.compile, job.source)
            grammar = await wire.inference.encoders.run(principal.tenant, compiling)
            job = replace(job, grammar=grammar)
        charge = await wire.books.meter.admit(principal, job)
        held.push_async_callback(charge.void)
        if wire.records.purges.reach(job.scope.tenant, job.arrival_ns):
            job = replace(job, cache=False)
        here = partial(Generation, engine=parts.engine, bridge=wire.inference.bridge)
        generation = (produce or here)(job, charge)
        held.callback(generation.close)
        generation.submit()
        ending.begin(generation, held)
    delivery = Delivery(
        generation=generation,
        charge=charge,
        wire=wire_format,
        stream=job.stream,
        asked=asked_for(request, extension),
        headers=permit.headers,
        write_timeout_s=wire.settings.write_timeout_s,
        keepalive_s=wire.settings.keepalive_s,
        ended=ending,
        keep=claimed.keep if claimed is not None else None,
        publish=publish,
    )
    return DeliveryResponse(delivery, request.app.state.deliveries)


def refuse(arrival: Arrival, job: Job, error: Exception) -> NoReturn:
    """Records in the journal that a request is refused before anything is held for it, and raises
    the reason."""
    ending = _Ending(arrival.log, arrival.wire, job, arrival.principal, arrival.request)
    ending.refused(type(error), error, None)
    raise error


class _Ending:
    """The end of a request: its journal and log entries, and the release of all that it holds."""

    def __init__(
        self, log: RequestLog, wire: Collaborators, job: Job, principal: Principal, request: Request
    ) -> None:
        self._log = log
        self._wire = wire
        self._parts = wire.inference.engine_of(job.model)
        self._job = job
        journal = wire.records.journal
        self._record = journal.record(
            job,
            principal,
            client_id=log.facts.get("client_request_id") or "",
            route=request.scope["path"],
            trace_parent=request.headers.get("traceparent", "")[:256],
        )
        self._usage = EMPTY
        self._held = AsyncExitStack()
        log.add(
            model=job.model.name,
            stream=job.stream,
            prompt_tokens=self._record.prompt_tokens,
            choices=job.num_choices,
        )

    def refused(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Records in the journal a refusal that unwinds the stack."""
        if error is not None:
            self._wire.records.journal.refuse(self._record, error)

    async def leave(self, permit: Permit) -> None:
        await permit.close(self._usage)

    def begin(self, generation: Producer, held: AsyncExitStack) -> None:
        """The engine has the request. From now on the delivery releases what it holds."""
        self._wire.records.journal.begin(self._record, generation)
        self._held = held.pop_all()
        self._parts.retention.began(self._job)

    async def __call__(self, delivered: Delivered) -> None:
        served, bill = delivered.served, delivered.bill
        self._usage = usage = bill.usage if bill else EMPTY
        first_ns = delivered.first_byte_ns
        sent = round((first_ns - self._log.arrival_ns) / 1e6, 3) if first_ns else None
        timings = {**timings_ms(served.timeline, served.usage.output), "first_byte": sent}
        async with self._held:
            self._wire.records.journal.settle(self._log.request_id, delivered)
            if not self._wire.records.purges.reach(self._job.scope.tenant, self._job.arrival_ns):
                self._remember(served)
                self._parts.retention.ended(self._job, served)
        self._log.add(
            outcome=str(served.outcome),
            delivered=delivered.complete,
            settled=bill is not None,
            prompt_tokens=self._record.prompt_tokens or usage.prompt,
            completion_tokens=usage.output,
            **{name: getattr(usage, name) for name in HIT_CLASSES},
            miss=usage.miss,
            cost=bill.cost if bill else None,
            **found_of(served),
            **{f"{name}_ms": value for name, value in timings.items()},
        )
        if delivered.error is not None:
            self._log.add(error=type(delivered.error).__name__)

    def _remember(self, served: Served) -> None:
        """Remembers a turn's tokens, to compare the next turn with."""
        turn = self._job.turn
        if turn is not None and served.outcome is Outcome.FINISHED:
            self._wire.records.conversations.remember(
                turn,
                self._job.prompts[0],
                served.transcripts,
                self._job.model.tokenizer,
                self._job.message_of or assistant_message,
            )
