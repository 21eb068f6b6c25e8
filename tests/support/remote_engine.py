"""A stand-in for an engine at a URL: real HTTP on 127.0.0.1, in vLLM's or SGLang's words.

What it answers to a request for tokens is a script: a list of things to do with the connection.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"
RESET = "reset"  # the connection is closed with what was sent so far


class RemoteEngineServer(ThreadingHTTPServer):
    """`script` answers each request: bytes are sent, numbers are seconds to wait, `RESET` closes.
    `about` has the answers to whatever else is asked, by path."""

    daemon_threads = True

    def __init__(self, about: dict[str, Any], tokens_at: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.about = about
        self.tokens_at = tokens_at
        self.status = 200
        self.sent_headers: dict[str, str] = {}  # with an error
        self.error = "secret words"
        self.key = ""  # asked for, if there is one
        self.asked_headers: list[dict[str, str]] = []
        self.script: Sequence[bytes | float | str] = ()
        self.asked: list[dict[str, Any]] = []
        self.left = threading.Event()  # somebody closed the connection before the end

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RemoteEngineServer

    def _is_known(self) -> bool:
        """vLLM asks for its key below /v1."""
        self.server.asked_headers.append(
            {each.lower(): self.headers[each] for each in self.headers}
        )
        given = self.headers.get("authorization", "").removeprefix("Bearer ")
        if self.server.key in ("", given) or not self.path.startswith("/v1"):
            return True
        self._say((401, {}))
        return False

    def do_GET(self) -> None:
        if not self._is_known():
            return
        self._say(self.server.about.get(self.path))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._is_known():
            return
        if self.path != self.server.tokens_at or not asked.get("stream"):
            found = self.server.about.get(self.path)
            self._say(found(asked) if callable(found) else found)
            return
        self.server.asked.append(asked)
        if self.server.status != 200:
            self._say({"error": self.server.error}, self.server.status, self.server.sent_headers)
            return
        sent = False
        for step in self.server.script:
            if step == RESET:
                self.close_connection = True
                self.connection.close()
                return
            if isinstance(step, float):
                time.sleep(step)
                continue
            assert isinstance(step, bytes)
            if not sent:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                sent = True
            try:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(step), step))
                self.wfile.flush()
            except OSError:
                self.server.left.set()
                return
        self.wfile.write(b"0\r\n\r\n")

    def _say(self, found: Any, status: int = 200, more: Mapping[str, str] = {}) -> None:
        if isinstance(found, tuple):
            status, found = found
        data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        self.send_response(404 if found is None else status)
        for name, value in {"content-length": str(len(data)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Says nothing."""


@contextmanager
def served(server: RemoteEngineServer) -> Iterator[RemoteEngineServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def event(payload: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps(payload).encode()


def vllm_chunk(tokens: list[int], finish: str | None = None, **more: Any) -> bytes:
    choice = {
        "index": 0,
        "text": "",
        "token_ids": tokens,
        "finish_reason": finish,
        "logprobs": None,
    }
    return event({"choices": [{**choice, "stop_reason": None, **more}]})


def vllm_usage(prompt: int, cached: Any = 0) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    return event(
        {"choices": [], "usage": {"prompt_tokens": prompt, "prompt_tokens_details": details}}
    )


def vllm_about(
    tokens: list[int], name: str, *, max_model_len: int = 100, scale_out: bool = False
) -> dict[str, Any]:
    """What a vLLM 0.32 says of itself. It tokenizes everything to `tokens`."""
    card = {"id": name, "root": f"/models/{name}", "parent": None, "max_model_len": max_model_len}
    one = {
        "choices": [{"token_ids": [1]}],
        "usage": {"prompt_tokens_details": {"cached_tokens": 0}},
    }
    config = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="50"} 1.0\n'
    return {
        "/version": {"version": "0.32.0"},
        "/v1/models": {"data": [card]},
        "/tokenize": {"tokens": tokens},
        "/v1/completions": one,
        "/inference/v1/generate": one if scale_out else (403, {"error": "no"}),
        "/metrics": config + "vllm:kv_cache_usage_perc 0.5\n",
    }


def sglang_about(tokens: list[int], name: str, **more: Any) -> dict[str, Any]:
    """What SGLang 0.5 says of itself, by its documentation."""
    card = {"id": name, "root": name, "max_model_len": 100}
    info = {"tokenizer_path": name, "version": "0.5.9", "page_size": 1, "max_total_num_tokens": 800}
    return {
        "/server_info": info | more,
        "/v1/models": {"data": [card]},
        "/tokenize": {"tokens": tokens},
        "/metrics": "",
    }


def sglang_chunk(tokens: list[int], num: int, finish: Any = None, **about: Any) -> bytes:
    meta = {"prompt_tokens": 32, "cached_tokens": 16, "completion_tokens": num}
    return event({"output_ids": tokens, "meta_info": {**meta, "finish_reason": finish, **about}})
