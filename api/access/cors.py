"""Lets the pages of `server.cors_origins` read the public routes' answers.

Credentials are never allowed: a page sends its key itself, and no cookie of the dashboard is sent.
"""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST")
OPERATORS = ("/admin", "/metrics")  # a page reads neither


class PublicCors(CORSMiddleware):
    """Answers preflights, and adds the headers to every answer outside `OPERATORS`."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network="*" not in origins,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        public = not scope.get("path", "/admin").startswith(OPERATORS)
        await (super().__call__ if public else self.app)(scope, receive, send)
