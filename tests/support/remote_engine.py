"""A stand-in for an engine at a URL: real HTTP on 127.0.0.1, in vLLM's or SGLang's words.

What it answers to a request for tokens is a script: a list of things to do with the connection.
"""

import json
from typing import Any

from tests.support.stand_in import Handler, Script, StandIn

DONE = b"data: [DONE]\n\n"


class RemoteEngineServer(StandIn):
    """`script` answers each request. `about` has the answers to whatever else is asked, by path."""

    def __init__(self, about: dict[str, Any], tokens_at: str = "/v1/completions") -> None:
        super().__init__(_Handler)
        self.about = about
        self.tokens_at = tokens_at
        self.status = 200
        self.sent_headers: dict[str, str] = {}  # with an error
        self.error = "secret words"
        self.key = ""  # asked for, if there is one
        self.asked_headers: list[dict[str, str]] = []
        self.script: Script = ()
        self.asked: list[dict[str, Any]] = []


class _Handler(Handler):
    server: RemoteEngineServer

    def _is_known(self) -> bool:
        """vLLM asks for its key below /v1."""
        sent = {name.lower(): value for name, value in self.headers.items()}
        self.server.asked_headers.append(sent)
        given = self.headers.get("authorization", "").removeprefix("Bearer ")
        if self.server.key in ("", given) or not self.path.startswith("/v1"):
            return True
        self.say_json({}, 401)
        return False

    def do_GET(self) -> None:
        if self._is_known():
            self._tell(self.server.about.get(self.path))

    def do_POST(self) -> None:
        asked, server = self.read_json(), self.server
        if not self._is_known():
            return
        if self.path != server.tokens_at or not asked.get("stream"):
            found = server.about.get(self.path)
            self._tell(found(asked) if callable(found) else found)
            return
        server.asked.append(asked)
        if server.status == 200:
            self.play(server.script)
        else:
            self.say_json({"error": server.error}, server.status, server.sent_headers)

    def _tell(self, found: Any) -> None:
        status = 404 if found is None else 200
        if isinstance(found, tuple):
            status, found = found
        self.say(status, found.encode() if isinstance(found, str) else json.dumps(found).encode())


def event(payload: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps(payload).encode()


def vllm_chunk(tokens: list[int], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish}
    return event({"choices": [{**choice, "logprobs": None, "stop_reason": None, **more}]})


def vllm_usage(prompt: int, cached: Any = 0) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "prompt_tokens_details": details}
    return event({"choices": [], "usage": usage})


def vllm_about(
    tokens: list[int], name: str, *, max_model_len: int = 100, scale_out: bool = False
) -> dict[str, Any]:
    """What a vLLM 0.32 says of itself. It tokenizes everything to `tokens`."""
    card = {"id": name, "root": f"/models/{name}", "parent": None, "max_model_len": max_model_len}
    usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    one = {"choices": [{"token_ids": [1]}], "usage": usage}
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
