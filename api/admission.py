"""From a checked body to an answer on its way: limits, hold, engine, delivery, and their undoing.

Job ─► permit (limits) ─► charge (hold) ─► Generation.submit ─► Delivery
           ▲                  ▲                  │ refused
           └──── close ───────┴──── void ◄───────┘
"""

import hashlib
import re
from dataclasses import dataclass, replace

from fastapi import Request
from starlette.responses import Response

from api.access.auth import Salts
from api.access.limits import Permit
from api.collaborators import Collaborators, ServedModel
from api.context import FIT_NAME, Story, single_header, story_of, wire_of
from api.errors import InvalidRequest
from api.journal.journal import Trail
from api.requests.delivery import Delivered, Delivery, DeliveryResponse, WireFormat
from api.requests.generation import Generation, Job, Served
from api.requests.idempotency import IDEMPOTENCY_KEY, Claim, claim, replayed
from api.requests.metering import Charge
from api.shapes.schemas import GenerationBody
from api.shapes.structured import compiled
from api.shapes.usage import Asked, timings_ms
from billing.gate.holds import RequestContext
from billing.gate.outcomes import Outcome
from billing.idempotency import Replay
from billing.keys import Principal
from billing.usage import EMPTY
from engine.execution.sampler import check_params
from tiers.blocks.keys import CacheScope


def scope_for(
    salts: Salts, model: ServedModel, principal: Principal, share: str | None
) -> CacheScope:
    """The model's scope with the salt of the tenant, or of the group that it shares in."""
    salt = salts.of_group(share, principal.tenant) if share else salts.of_tenant(principal.tenant)
    return replace(model.scope, tenant=salt)


def request_context(request: Request, principal: Principal, raw: bytes) -> RequestContext:
    """Who asked, and for what, as the ledger keeps it.

    The fingerprint tells a retry of the same request from a new one: the same body under the same
    API key, and under the same Idempotency-Key or else by a client library that says
    x-stainless-retry-count.
    """
    name = single_header(request, IDEMPOTENCY_KEY)
    asked = f"{principal.tenant}\0{principal.key_id}\0{request.url.path}\0{name}\0".encode()
    fingerprint = hashlib.blake2b(asked + raw, digest_size=16).hexdigest()
    retries = request.headers.get("x-stainless-retry-count", "")
    session = request.headers.get("x-session-id", "")
    return RequestContext(
        project=principal.project,
        key_id=principal.key_id,
        session=session if FIT_NAME.fullmatch(session) else "",
        fingerprint=fingerprint,
        is_retry=name is not None or re.fullmatch(r"0*[1-9][0-9]*", retries) is not None,
    )


def trail_of(request: Request) -> Trail:
    return Trail(request.url.path, request.headers.get("traceparent", "")[:256])


def asked_for(request: Request, body: GenerationBody) -> Asked:
    """The vendor parts asked for, by the body's `cachesvc` or by the header X-Cachesvc."""
    words = {word.strip() for word in request.headers.get("x-cachesvc", "").lower().split(",")}
    extension = body.extension
    return Asked(
        details=bool(extension.details) or "details" in words,
        receipt=bool(extension.receipt) or "receipt" in words,
    )


def check_size(wire: Collaborators, body: GenerationBody, num_prompts: int) -> None:
    """Refuses more choices than one request may have."""
    choices = num_prompts * (body.n or 1)
    if choices > wire.settings.max_choices:
        raise InvalidRequest(
            f"{num_prompts} prompts times n={body.n or 1} make {choices} choices; this server "
            f"answers at most {wire.settings.max_choices} in one request.",
            param="n",
        )


async def deliver(
    request: Request,
    principal: Principal,
    job: Job,
    body: GenerationBody,
    wire_format: WireFormat,
    raw: bytes,
) -> Response:
    """Admits the job and returns the response that will carry its answer, or a kept one again."""
    check_params(job.params, job.model.vocab_size)
    wire, story = wire_of(request), story_of(request)
    fingerprint = job.context.fingerprint
    claimed = await claim(wire.replays, request, principal, raw, job.request_id, fingerprint)
    if isinstance(claimed, Replay):
        story.add(replay_of=claimed.request_id)
        return replayed(claimed, stream=bool(body.stream))
    try:
        return await _admitted(request, principal, job, body, wire_format, claimed)
    except BaseException as error:
        stream = bool(body.stream)
        wire.journal.refuse(
            job,
            principal,
            error,
            client_id=story.client_id,
            stream=stream,
            trail=trail_of(request),
        )
        if claimed is not None:
            await claimed.close()
        raise


async def _admitted(
    request: Request,
    principal: Principal,
    job: Job,
    body: GenerationBody,
    wire_format: WireFormat,
    claimed: Claim | None,
) -> Response:
    """Passes the limits and the money gate, starts the engine, and builds the delivery."""
    wire, story, stream = wire_of(request), story_of(request), bool(body.stream)
    story.add(
        model=job.model.name,
        stream=stream,
        prompt_tokens=job.prompt_tokens,
        choices=job.num_choices,
    )
    permit = await wire.limits.admit(principal)
    try:
        if job.source is not None:
            job = replace(job, grammar=await compiled(wire, job.source))
        charge = await wire.meter.admit(principal, job)
        generation = await _submitted(wire, job, charge)
        wire.journal.begin(
            job,
            principal,
            generation,
            client_id=story.client_id,
            stream=stream,
            trail=trail_of(request),
        )
    except BaseException:
        await permit.close(EMPTY)
        raise
    asked = asked_for(request, body)
    delivery = Delivery(
        generation=generation,
        charge=charge,
        wire=wire_format,
        stream=stream,
        usage_chunk=body.wants_usage_chunk or asked != Asked(),
        asked=asked,
        headers=permit.headers,
        write_timeout_s=wire.settings.write_timeout_s,
        keepalive_s=wire.settings.keepalive_s,
        ended=_Ending(story, permit, claimed, wire, job),
        keep=claimed.keep if claimed is not None else None,
    )
    return DeliveryResponse(delivery, request.app.state.deliveries)


async def _submitted(wire: Collaborators, job: Job, charge: Charge) -> Generation:
    """The running generation; whatever stops it from starting gives the hold back."""
    try:
        generation = Generation(job, engine=wire.engine, bridge=wire.bridge, coverage=charge)
        generation.submit()
    except BaseException:
        await charge.void()
        raise
    return generation


@dataclass(frozen=True, slots=True)
class _Ending:
    """What follows a delivery: the permit goes back, and the request's story is complete."""

    story: Story
    permit: Permit
    claimed: Claim | None
    wire: Collaborators
    job: Job

    async def __call__(self, delivered: Delivered) -> None:
        served, bill = delivered.served, delivered.bill
        usage = bill.usage if bill else EMPTY
        self.wire.journal.settle(self.story.request_id, delivered)
        self._remember(served)
        await self.permit.close(usage)
        if self.claimed is not None:
            await self.claimed.close()
        self.story.add(
            outcome=str(served.outcome),
            delivered=delivered.complete,
            settled=bill is not None,
            completion_tokens=usage.output,
            hit_device=usage.hit_device,
            hit_host=usage.hit_host,
            hit_disk=usage.hit_disk,
            hit_remote=usage.hit_remote,
            miss=usage.miss,
            miss_reasons={str(why): tokens for why, tokens in served.miss_reasons.items()},
            cost=bill.cost if bill else None,
            jumped_tokens=served.jumped_tokens or None,
            parted_at_token=served.parting.at_token if served.parting else None,
            parted_of_tokens=served.parting.of_tokens if served.parting else None,
            parted_by=str(served.parting.reason) if served.parting else None,
            **{f"{name}_ms": value for name, value in self._timings(delivered).items()},
        )
        if delivered.error is not None:
            self.story.add(error=type(delivered.error).__name__)

    def _remember(self, served: Served) -> None:
        """A turn's tokens, for the next turn to be compared with."""
        conversations, turn = self.wire.conversations, self.job.turn
        if conversations is not None and turn is not None and served.outcome is Outcome.FINISHED:
            conversations.remember(
                turn, self.job.prompts[0], served.transcripts, self.job.model.tokenizer
            )

    def _timings(self, delivered: Delivered) -> dict[str, float | None]:
        first = delivered.first_byte_ns
        timings = timings_ms(delivered.served.timeline, delivered.served.usage.output)
        sent = round((first - self.story.arrival_ns) / 1e6, 3) if first else None
        return {**timings, "first_byte": sent}
