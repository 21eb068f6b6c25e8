"""POST /v1/responses and related routes: OpenAI's Responses over the same chats."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admission import deliver
from api.collaborators import Collaborators
from api.context import authorised, received, wire_of
from api.errors import NotServed, RecordNotFound
from api.job import Job
from api.relay.protocol import RESPONSES
from api.requests.responses import KeptResponse
from api.routes.conversation import chat_of
from api.routes.relayed import relayed
from api.shapes.body import parse
from api.shapes.fields import ignored_names
from api.shapes.responses import ResponsesBody
from api.shapes.responses_format import ResponsesFormat
from api.shapes.translation import with_answer

router = APIRouter(tags=["responses"])


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)
async def responses(request: Request) -> Response:
    """A response as JSON, or as events with `stream`.

    It is stored for later turns unless `store` is false.
    """
    arrival = await received(request, queues=True)
    if (passed := await relayed(arrival, RESPONSES)) is not None:
        return passed
    body = parse(arrival.raw, ResponsesBody)
    wire, tenant = arrival.wire, arrival.principal.tenant
    arrival.log.add(ignored_fields=ignored_names(body) or None)
    named, history = body.previous_response_id, list[dict[str, Any]]()
    if named is not None:  # without its instructions, which belong to one request
        history += (await _found(wire, tenant, named, "previous_response_id")).messages
    asked = body.as_chat(history)
    job, new_reply = await chat_of(
        arrival, asked, replays=named is not None, limit="max_output_tokens"
    )
    keep = partial(_keep, wire, tenant, body, history, job)
    wire_format = ResponsesFormat(job, new_reply(), body, keep)
    return await deliver(arrival, job, asked.extension, wire_format)


@router.get("/v1/responses/{name}")
async def show_response(request: Request, name: str) -> dict[str, Any]:
    principal = await authorised(request)
    return (await _found(wire_of(request), principal.tenant, name)).response


@router.get("/v1/responses/{name}/input_items", include_in_schema=False)
async def show_items(request: Request, name: str) -> None:
    await authorised(request)
    raise NotServed("The input of a response is not listed; keep what you sent.")


@router.delete("/v1/responses/{name}")
async def delete_response(request: Request, name: str) -> dict[str, Any]:
    principal = await authorised(request)
    wire = wire_of(request)
    await _found(wire, principal.tenant, name)
    salt = wire.access.salts.of_tenant(principal.tenant)
    wire.records.responses.delete(salt, name)
    return {"id": name, "object": "response", "deleted": True}


async def _found(
    wire: Collaborators, tenant: str, name: str, param: str | None = None
) -> KeptResponse:
    kept = await wire.records.responses.get(wire.access.salts.of_tenant(tenant), name)
    if kept is None:
        raise RecordNotFound(
            f"Response '{name[:80]}' is not stored: it was sent with store false, deleted, or "
            "long ago. Send the whole conversation as input.",
            param=param,
        )
    return kept


def _keep(
    wire: Collaborators,
    tenant: str,
    body: ResponsesBody,
    history: list[dict[str, Any]],
    job: Job,
    response: dict[str, Any],
    answer: dict[str, Any],
) -> None:
    """Keeps the response, unless `store` is false or the tenant was purged meanwhile."""
    salt = wire.access.salts.of_tenant(tenant)
    if body.store is False or wire.records.purges.reach(salt, job.arrival_ns):
        return
    said = {name: value for name, value in answer.items() if value is not None}
    messages = with_answer([*history, *body.messages()], {"content": "", **said})
    kept = KeptResponse(response, messages)
    wire.records.responses.put(salt, response["id"], kept)
