"""Security headers of everything under `/admin`.

Browsers run only our files, show our pages in no frame and cache nothing. Inline scripts and styles
and other hosts are forbidden, so injected content does not run. Pure ASGI, so that refusals carry
the headers too.
"""

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.page_headers import HEADERS, POLICY

PREFIX: Final = "/admin"


class AdminHeaders:
    """Adds the headers to every answer under `/admin`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Content-Security-Policy", POLICY)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, guarded)
