"""The application: `create_app` joins the routes, the middleware and the collaborators.

There is no global state: `app.state.wire` holds the collaborators, and the rest belongs to the
running loop. `cachesvc.service` calls this once per server.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import orjson
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.access.body_bound import BodyBound
from api.access.cors import PublicCors
from api.admin.later import LaterAdmin
from api.admin.pages.base import refusal_page
from api.admin.parts import AdminParts
from api.collaborators import Collaborators
from api.context import RequestLog
from api.errors import ApiError, NotJson, answer_to, log_untold
from api.page_headers import PageHeaders
from api.request_log import RequestLogger
from api.routes import (
    account,
    caches,
    chat,
    completions,
    customer_page,
    health,
    messages,
    models,
    quote,
    responses,
    tokenize,
    unserved,
    usage,
)
from api.shapes.body import refusal
from api.shapes.messages_format import anthropic_error
from billing.errors import BillingError
from engine.errors import EngineError
from tiers.errors import TierError

GENERATING = (chat, completions, messages, responses)  # most requests
REFUSALS = (ApiError, EngineError, BillingError, TierError, HTTPException)
BARE = {"request": Request, "return": Response}  # what the framework need do nothing for
AREAS = (
    unserved,  # before the routes with a name in their path
    *GENERATING,
    caches,
    quote,
    models,
    tokenize,
    account,
    usage,
    health,
)
SEND_JSON = "The body is no JSON object; send one, as application/json."
DRAIN_S = 30.0  # deliveries that outlive their connections settle within this at shutdown
DESCRIPTION = (
    "OpenAI-compatible completions over a tiered context cache. Prompt tokens served from the "
    "cache are counted and priced as hits."
)


def create_app(
    wire: Collaborators,
    *,
    admin: AdminParts | None = None,
    routers: Sequence[APIRouter] = (),
    version: str = "0",
) -> FastAPI:
    """The ASGI app. With `admin` it has the routes under `/admin`, made when they are first asked
    for. `routers` are further routes, mounted after the API's own."""
    app = FastAPI(
        title="cachesvc",
        description=DESCRIPTION,
        version=version,
        lifespan=_lifespan,
        docs_url=None,  # it would load third-party scripts in the dashboard's origin
        redoc_url=None,
        redirect_slashes=False,  # its URL comes from the Host header: http behind a TLS proxy
    )
    app.state.wire = wire
    app.state.deliveries = set()
    for router in (*(area.router for area in AREAS), customer_page.router, *routers):
        app.include_router(router)
    later = [] if admin is None else [LaterAdmin(app, admin)]
    app.router.routes[:0] = later
    for kind in REFUSALS:
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_middleware(direct_routes)
    app.add_middleware(BodyBound, max_bytes=wire.settings.max_body_bytes)
    app.add_middleware(PageHeaders)
    app.add_middleware(RequestLogger, observe=wire.observe_http)
    if wire.settings.cors_origins:
        app.add_middleware(PublicCors, origins=wire.settings.cors_origins)
    return app


def direct_routes(app: ASGIApp) -> ASGIApp:
    """The routes to answers once more, without the framework's search and reading of parameters:
    they take the bare request. What they raise is answered as elsewhere."""
    endpoints = {
        ("POST", route.path): route.endpoint
        for area in GENERATING
        for route in area.router.routes
        if isinstance(route, APIRoute) and route.endpoint.__annotations__ == BARE
    }

    async def direct(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoints.get((scope.get("method", ""), scope.get("path", "")))
        if endpoint is None:
            return await app(scope, receive, send)
        request = Request(scope, receive, send)
        try:
            response: Response = await endpoint(request)
        except REFUSALS as error:
            response = await _answer(request, error)
        return await response(scope, receive, send)

    return direct


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Binds the engine's outputs to this loop; at shutdown waits for unsettled deliveries."""
    app.state.wire.inference.bridge.bind(asyncio.get_running_loop())
    engines = app.state.wire.inference.engines
    watches = [asyncio.create_task(each.watch()) for each in engines if each.watch is not None]
    try:
        yield
    finally:
        if app.state.deliveries:
            await asyncio.wait(app.state.deliveries, timeout=DRAIN_S)
        app.state.wire.inference.bridge.unbind()
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)  # they close what they opened
        await app.state.wire.access.limits.close()


async def _answer(request: Request, error: Exception) -> Response:
    """A refusal in its protocol's shape, or as a page if a browser asked for `/admin`."""
    if isinstance(error, HTTPException) and isinstance(error.__cause__, Exception):
        # FastAPI's own 400: reading the body failed.
        cause = error.__cause__
        error = cause if isinstance(cause, ApiError) else NotJson(SEND_JSON)
    answer = answer_to(error)
    log: RequestLog = request.state.request_log
    log.add(error=type(error).__name__, param=answer.param)
    log_untold(log.request_id, error)
    if (page := refusal_page(request, answer)) is not None:
        return page
    is_anthropic = request.url.path.startswith("/v1/messages")
    body = anthropic_error(answer) if is_anthropic else answer.body()
    return Response(orjson.dumps(body), answer.status, dict(answer.headers), "application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    """The answer to an invalid body, query or path of an admin route, in the same shape."""
    assert isinstance(error, RequestValidationError), error
    found = [dict(one) | {"loc": one["loc"][1:] or one["loc"]} for one in error.errors()]
    if found[0]["type"] == "json_invalid" or found[0]["loc"] == ("body",):
        return await _answer(request, NotJson(SEND_JSON))
    return await _answer(request, refusal(found))
