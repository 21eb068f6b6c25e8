"""A real HTTP server in a thread, over fakes or a service, for tests that ask as clients do."""

import asyncio
import contextlib
import socket
import threading

import uvicorn

from api.app import create_app
from cachesvc.server.server_file import announced
from tests.patience import until
from tests.support.admin import OPERATOR_TOKEN


@contextlib.contextmanager
def listening(app):
    """uvicorn as `cachesvc serve` runs it. Gives the URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="on", http="httptools", loop="asyncio")
    http = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener])))
    thread.start()
    until(lambda: http.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join()
        listener.close()


@contextlib.contextmanager
def announcing(data_dir, parts, house):
    """One over fakes, announced in a data directory as `serve` does."""
    app = create_app(house.wire, admin=parts)
    with contextlib.closing(house), listening(app) as url, announced(data_dir, url, OPERATOR_TOKEN):
        yield
