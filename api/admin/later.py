"""The admin routes at a start: one route that makes the others when somebody asks for them.

They are a tenth of a server's imports, for pages that most starts never show.
"""

import asyncio

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from api.admin.parts import AdminParts

PREFIX = "/admin"
FRONT = ("/", "/docs")  # of the dashboard's pages, those that are not under `/admin`


class LaterAdmin(BaseRoute):
    """Stands for all of the dashboard's routes of `app`. The first request for one of them, or for
    the document that names every route, adds them and takes this one away. If they cannot be
    imported, that request fails, and the next one tries again. Event loop; a thread imports."""

    def __init__(self, app: FastAPI, parts: AdminParts) -> None:
        self._app = app
        self._parts = parts
        self._adding = asyncio.Lock()

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        path = scope.get("path", "")
        asked = path in (*FRONT, PREFIX, self._app.openapi_url) or path.startswith(f"{PREFIX}/")
        return (Match.FULL if asked else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._adding:
            if self in self._app.router.routes:
                await asyncio.to_thread(self._add)
                self._app.router.routes.remove(self)
        await self._app.router(scope, receive, send)

    def _add(self) -> None:
        from api.admin.router import admin_router  # see above

        self._app.include_router(admin_router(self._parts))
