"""An ASGI client that can read slowly and go away, which httpx's in-process transport cannot."""

import asyncio
import json


class Visit:
    """One request to the app, its messages as they come."""

    def __init__(self, app, path, body, **headers):
        self._app = app
        self._scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}}
        self._scope |= {"http_version": "1.1", "scheme": "http", "root_path": ""}
        self._scope |= {"method": "POST", "path": path, "raw_path": path.encode()}
        self._scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "server": ("test", 80)}
        self._scope["headers"] = [(n.encode(), value.encode()) for n, value in headers.items()]
        self._body = json.dumps(body).encode()
        self._left = asyncio.Event()
        self.messages = []
        self.arrived = asyncio.Event()
        self.broken = False  # writing fails, as to a closed socket
        self.stuck = False  # writing never ends, as to a client that reads nothing

    def start(self):
        self.task = asyncio.create_task(self._app(self._scope, self._receive, self._send))
        return self

    def leave(self):
        self._left.set()

    async def leave_when(self, reached):
        """Goes away at this moment, and waits until the app is done with it."""
        async with asyncio.timeout(30):
            while not reached():
                await asyncio.sleep(0.005)
        self.leave()
        await self.task

    @property
    def text(self):
        return b"".join(m.get("body", b"") for m in self.messages).decode()

    async def first_text(self):
        """Waits until some of the body has come."""
        async with asyncio.timeout(30):
            while not self.text:
                self.arrived.clear()
                await self.arrived.wait()

    async def _receive(self):
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if self.stuck:
            await asyncio.Event().wait()
        if self.broken:
            raise OSError("the socket is closed")
        self.messages.append(message)
        self.arrived.set()
