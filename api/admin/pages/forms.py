"""What a page's form sends, as the JSON that the same JSON route takes from programs.

So a form needs no route and no check of its own: the templates name a route and its fields. A name
may say how its text is read (`READ`), as in `expires_in_s:days`. The answer is a page with the
route's document; a refusal is the refusal as a page.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import FormData
from starlette.responses import Response

from api.admin.access import CSRF_FIELD, CSRF_HEADER, is_form
from api.admin.pages.base import render
from api.errors import InvalidRequest


def _seconds(of_one: int) -> Callable[[str], int]:
    return lambda text: round(float(text) * of_one)


# How a typed text is read. `each` makes a list of all fields of its name; a `count` that is left
# empty is null, another field is left out.
READ: Final[Mapping[str, Callable[[str], Any]]] = {
    "": str,
    "each": str,
    "count": int,
    "days": _seconds(86_400),
    "hours": _seconds(3600),
    "yes": lambda text: text == "yes",
    "limit": lambda text: None if text.lower() == "unlimited" else text,
}


class FormRoute(APIRoute):
    """A JSON route that takes forms too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            if not is_form(request):
                return await handle(request)
            answer = await handle(_as_json(request, await request.form()))
            back = urlsplit(request.headers.get("referer", "/admin")).path
            document = orjson.loads(answer.body)
            return render(
                request,
                "done.html",
                request.state.admin,
                document=document if isinstance(document, dict) else {"result": document},
                back=back if back.startswith("/admin") else "/admin",
            )

        return handler


def _as_json(request: Request, sent: FormData) -> Request:
    """The request that a program would have sent."""
    token = str(sent.get(CSRF_FIELD, request.headers.get(CSRF_HEADER, "")))
    replaced = {
        b"content-type": b"application/json",
        CSRF_HEADER.lower().encode(): token.encode("latin-1", "replace"),
    }
    kept = [each for each in request.scope["headers"] if each[0] not in replaced]
    body = orjson.dumps(typed(sent))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    return Request({**request.scope, "headers": [*kept, *replaced.items()]}, receive)


def typed(sent: FormData) -> dict[str, Any]:
    """The document that a form's fields make; `a.b` is `b` within `a`. Raises InvalidRequest."""
    found: dict[str, Any] = {}
    for field, value in sent.multi_items():
        text, (path, _, kind) = str(value).strip(), field.partition(":")
        if field == CSRF_FIELD or kind == "none":  # what the browser checks alone
            continue
        *outer, name = path.split(".", 1)
        into = found.setdefault(outer[0], {}) if outer else found
        try:
            read = READ[kind](text) if text else None
        except (ValueError, OverflowError):
            raise InvalidRequest(
                f"{text[:64]!r} is not a number. Nothing was changed.", param=path
            ) from None
        if kind == "each":
            into.setdefault(name, []).extend([read] if text else [])
        elif text or kind == "count":
            into[name] = read
    return found
