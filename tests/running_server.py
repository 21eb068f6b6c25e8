"""A real HTTP server over fakes, for tests of commands that speak with a running server."""

import asyncio
import contextlib
import socket
import threading
import time

import uvicorn

from api.app import create_app
from cachesvc.server.server_file import announced
from tests.support.admin import OPERATOR_TOKEN


class Running:
    """A real HTTP server over fakes, announced in a data directory as `serve` does."""

    def __init__(self, data_dir, parts, house):
        self.data_dir, self.house = data_dir, house
        application = create_app(house.wire, admin=parts)
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(application, log_config=None, lifespan="on", loop="asyncio")
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, name="http")

    def _run(self):
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self._announcement = announced(self.data_dir, self.url, OPERATOR_TOKEN)
        self._announcement.__enter__()
        return self

    def __exit__(self, *_):
        self._announcement.__exit__(None, None, None)
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
        self.house.close()
