"""Requests for a model behind an endpoint of the client's own protocol: they pass."""

from dataclasses import replace
from functools import partial

from starlette.responses import Response

from api.admission import deliver, refuse
from api.context import Arrival, request_context
from api.errors import Unsupported
from api.job import Job
from api.relay.body import Ascent, PassedBody, labels_of, protocol_headers
from api.relay.protocol import ClientProtocol
from api.requests.delivery import Producer
from api.requests.metering import LedgerCharge
from api.served_model import NO_ENGINE, named
from api.shapes.body import checked, document_in
from api.shapes.schemas import Extension
from engine.errors import RemoteAway
from engine.request import SamplingParams


async def relayed(arrival: Arrival, protocol: ClientProtocol) -> Response | None:
    """The answer of the model's endpoint; None if the model is served here.

    Raises what is wrong with the body, by field, and RemoteAway for a model that is absent.
    """
    wire, log, tenant = arrival.wire, arrival.log, arrival.principal.tenant
    if not any(each.endpoint or each.is_absent for each in wire.inference.models.values()):
        return None
    document = document_in(arrival.raw)
    name = document.get("model")
    model = named(wire.inference.models, name if isinstance(name, str) else None)
    endpoint = model.endpoint
    if endpoint is None and not model.is_absent:
        return None
    body = checked(labels_of(document, protocol), PassedBody)
    scope = wire.access.salts.scoped(model.scope, tenant)
    job = Job(
        request_id=log.request_id,
        model=model,
        prompts=(),
        params=SamplingParams(
            n=body.num_choices, max_tokens=body.max_output(model.max_context, protocol.limits)
        ),
        tenant=tenant,
        scope=scope,
        stream=bool(body.stream),
        held_whole=not body.stream,
        arrival_ns=log.arrival_ns,
        context=request_context(arrival, body),
    )
    if endpoint is None:
        refuse(arrival, job, RemoteAway(NO_ENGINE))
    body.check(1 if endpoint.counts_one else wire.settings.max_choices)
    if arrival.request.headers.get("x-cachesvc"):
        raise Unsupported("X-Cachesvc is not served with this model: its answers pass unchanged.")
    ascent = Ascent(
        protocol=protocol,
        document=document,
        endpoint=endpoint,
        salt=scope.tenant,
        headers=protocol_headers(arrival.request.headers),
    )
    job = replace(job, prompt_most=ascent.most_tokens(model.max_context, body.num_prompts))
    wants_usage = body.wants_usage or not protocol.asks_for_usage
    produce = partial(_passage, ascent, wants_usage)
    return await deliver(arrival, job, Extension(), protocol.answer(), produce)


def _passage(ascent: Ascent, wants_usage: bool, job: Job, charge: LedgerCharge) -> Producer:
    from api.relay.passage import Passage  # with aiohttp, which no other server needs

    return Passage(job, ascent, wants_usage=wants_usage, charge=charge)
