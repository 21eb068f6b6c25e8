"""What a browser sees first: the dashboard at `/`, and the API at `/docs`.

The API page is generated from the routes and runs no script.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import RedirectResponse, Response

from api.admin.pages.base import render
from api.admin.pages.format import marked
from api.page_headers import HEADERS, POLICY
from api.routes.unserved import UNSERVED
from api.shapes.schemas import ChatBody, CompletionBody

router = APIRouter(include_in_schema=False)

BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}


@router.get("/")
async def front() -> Response:
    return RedirectResponse("/admin", 307)


@router.get("/docs")
async def api_page(request: Request) -> Response:
    """Every route with its parameters; `/openapi.json` has the same for programs."""
    page = render(
        request, "api.html", None, routes=_routes(request.app.openapi()), unserved=UNSERVED
    )
    page.headers.update(HEADERS | {"Content-Security-Policy": POLICY})
    return page


def _routes(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "method": method.upper(),
            "path": path,
            "text": marked(operation.get("description") or operation["summary"]),
            "fields": _fields(path),
        }
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]


def _fields(path: str) -> list[tuple[str, str]]:
    """Name and type of each field of a body."""
    if path not in BODIES:
        return []
    schema = BODIES[path].model_json_schema()
    required = schema.get("required", ())
    return [
        (name, _type(field) + (", required" if name in required else ""))
        for name, field in schema["properties"].items()
    ]


def _type(field: dict[str, Any]) -> str:
    """A JSON schema in words: `integer, 1 or more`."""
    if "anyOf" in field:
        kinds = [_type(each) for each in field["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field:
        return " or ".join(f"'{value}'" for value in field["enum"])
    kind: str = field.get("type", "object" if "$ref" in field else "any")
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    bounds = [
        f"{words} {field[name]}"
        for name, words in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
        )
        if name in field
    ]
    return ", ".join([kind, *bounds])
