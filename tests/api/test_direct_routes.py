"""Most requests are answered without the framework's search for a route and for parameters."""

import httpx
from fastapi import FastAPI
from starlette.routing import Match, Route

from api.app import AREAS

ANSWERS = {
    "/v1/chat/completions",
    "/chat/completions",
    "/v1/completions",
    "/completions",
    "/v1/messages",
    "/v1/responses",
    "/responses",
}


async def test_the_first_routes_are_those_to_answers(app: FastAPI) -> None:
    first = app.router.routes[: len(ANSWERS)]
    assert ANSWERS == {route.path for route in first if type(route) is Route}


async def test_each_goes_where_the_framework_would_have_gone(app: FastAPI) -> None:
    own = {route.path: route for area in AREAS for route in area.router.routes}
    for path in ANSWERS:
        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        found = next(route for route in app.router.routes if route.matches(scope)[0] is Match.FULL)
        assert isinstance(found, Route)
        assert own[path].endpoint is found.endpoint


async def test_another_method_is_refused(client: httpx.AsyncClient) -> None:
    for path in ANSWERS:
        assert 405 == (await client.get(path)).status_code
