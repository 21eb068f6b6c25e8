"""A service on a local socket that meters usage: it fails, loses its answers and asks to wait."""

import random
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import orjson

Reply = tuple[int, Any]


class Service:
    """Subclasses answer; `is_wild` lets the dice decide what becomes of a request on its way."""

    def __init__(self, seed: int) -> None:
        self.dice, self.is_wild, self.num_calls = random.Random(seed), True, 0
        self.problems: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.reply(self.rfile.read(int(self.headers["content-length"])))

            def do_GET(self) -> None:
                self.reply(b"")

            def reply(self, body: bytes) -> None:
                parts = urlsplit(self.path)
                query = dict(parse_qsl(parts.query))
                service.num_calls += 1
                fate = "take"
                if service.is_wild:
                    fate = service.dice.choice(["take", "take", "refuse", "lose the answer"])
                if fate == "refuse":
                    status = service.dice.choice([409, 429, 500, 503])
                    self.say(status, {"error": "later"})
                    return
                status, said = service.answer(self.command, parts.path, query, self.headers, body)
                if fate != "lose the answer":
                    self.say(status, said)

            def say(self, status: int, said: Any) -> None:
                self.send_response(status)
                if status == 429:
                    self.send_header("retry-after", "0")
                self.end_headers()
                self.wfile.write(orjson.dumps(said))

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def answer(
        self, method: str, path: str, query: dict[str, str], headers: Mapping[str, str], body: bytes
    ) -> Reply:
        raise NotImplementedError

    def check(self, is_so: bool, problem: str) -> None:
        """A call that the real service would not understand; tests look at `problems`."""
        if not is_so:
            self.problems.append(problem)

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
