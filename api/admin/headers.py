"""What browsers are told about everything under `/admin`: run our files only, show them nowhere
else, keep nothing.

Pure ASGI, so that refusals carry the headers too. No inline script or style is allowed, and no
other host: what an attacker gets into a page does not run. A page that carries its own style, to be
saved and printed, is allowed that one style by its digest (`with_style`).
"""

import base64
import hashlib
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFIX: Final = "/admin"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Final = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: that would make browsers send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


def with_style(page: str) -> dict[str, str]:
    """The headers of a page that is itself alone: nothing but its `<style>` is allowed."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rest = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; {rest}"
    return {"Content-Security-Policy": policy}


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
