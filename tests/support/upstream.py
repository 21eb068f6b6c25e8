"""A stand-in for an endpoint that a server passes requests to: real HTTP on 127.0.0.1.

It answers with what a test wrote: bytes as they are, cut wherever the test wants.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tests.support.remote_engine import DONE, event
from tests.support.stand_in import Handler, Script, StandIn

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PROMPT, CACHED, OUTPUT = 100, 64, 3  # what the answers below count


class UpstreamServer(StandIn):
    """`script` is a stream's answer by path, `whole` one that comes at once, or bit by bit.
    `status` refuses."""

    def __init__(self, name: str = "up", **card: Any) -> None:
        super().__init__(_Handler)
        self.cards: list[dict[str, Any]] = [{"id": name, "max_model_len": 4000, **card}]
        self.status, self.headers = 200, dict[str, str]()
        self.root = "/v1"  # before the paths of a protocol
        self.lists = 200  # the status of its list of models
        self.num_looks = 0  # at that list
        self.refusal: bytes | Script = b"{}"
        self.script: dict[str, Script] = {path: stream_of(path) for path in PATHS}
        self.whole: dict[str, bytes | Script] = {path: compact(WHOLE[path]) for path in PATHS}
        self.asked: list[tuple[str, Mapping[str, str], dict[str, Any]]] = []


class _Handler(Handler):
    server: UpstreamServer

    def do_GET(self) -> None:
        found = {"object": "list", "data": self.server.cards}
        self.server.num_looks += 1
        is_list = self.path == f"{self.server.root}/models"
        self.say_json(found, self.server.lists if is_list else 404)

    def do_POST(self) -> None:
        server, body = self.server, self.read_json()
        self.path = "/v1" + self.path.removeprefix(server.root)
        sent = {name.lower(): value for name, value in self.headers.items()}
        server.asked.append((self.path, sent, body))
        headers = {"x-inside": "rack 7", "set-cookie": "a=b", **server.headers}
        of_json = {"content-type": "application/json"} | headers
        if server.status != 200:
            if isinstance(refusal := server.refusal, bytes):
                self.say(server.status, refusal, of_json)
            else:
                self.play(refusal, of_json, server.status)
        elif body.get("stream"):
            self.play(server.script[self.path], headers)
        elif isinstance(whole := server.whole[self.path], bytes):
            self.say(200, whole, of_json)
        else:
            self.play(whole, of_json)


def named(kind: str, **more: Any) -> bytes:
    """An event with its type as its name."""
    return b"event: %s\n" % kind.encode() + event({"type": kind, **more})


def _chat(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
    return event({"id": "c-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def _text(text: str, finish: str | None = None) -> bytes:
    return event({"id": "t-1", "choices": [{"index": 0, "text": text, "finish_reason": finish}]})


_ALL, _HIT = {"total_tokens": PROMPT + OUTPUT}, {"cached_tokens": CACHED}
OPENAI_USAGE: dict[str, Any] = {"prompt_tokens": PROMPT, "completion_tokens": OUTPUT, **_ALL}
OPENAI_USAGE |= {"prompt_tokens_details": _HIT}
RESPONSES_USAGE: dict[str, Any] = {"input_tokens": PROMPT, "output_tokens": OUTPUT, **_ALL}
RESPONSES_USAGE |= {"input_tokens_details": _HIT}
MESSAGES_USAGE = {"input_tokens": PROMPT - CACHED, "cache_read_input_tokens": CACHED}
MESSAGES_USAGE |= {"cache_creation_input_tokens": 0, "output_tokens": OUTPUT}
_BEGUN = MESSAGES_USAGE | {"output_tokens": 1}  # as Anthropic says at the beginning
_MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "up"}
_RESPONSE = {"id": "resp_1", "object": "response", "model": "up", "output": []}
_TEXT = {"type": "output_text", "text": "Hi!"}
_SAID = {"type": "message", "role": "assistant", "content": [_TEXT]}
_DONE = {**_RESPONSE, "output": [_SAID], "usage": RESPONSES_USAGE}
_STOP = {"stop_reason": "end_turn", "stop_sequence": None}


def _of_block(delta: str) -> bytes:
    text = {"type": "text_delta", "text": delta}
    return named("content_block_delta", index=0, delta=text)


USAGE_CHUNK = event({"id": "c-1", "choices": [], "usage": OPENAI_USAGE})

# What comes before the text, the text in three events, the end without and with the usage, a close.
STREAMS: Mapping[str, tuple[list[bytes], list[bytes], list[bytes], list[bytes], list[bytes]]] = {
    CHAT: (
        [_chat({"role": "assistant", "content": ""})],
        [_chat({"content": text}) for text in ("H", "i", "!")],
        [_chat({}, "stop")],
        [USAGE_CHUNK],
        [DONE],
    ),
    COMPLETIONS: ([], [_text(text) for text in "Hi!"], [_text("", "stop")], [USAGE_CHUNK], [DONE]),
    MESSAGES: (
        [
            named("message_start", message={**_MESSAGE, "content": [], "usage": _BEGUN}),
            named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        ],
        [_of_block(text) for text in ("H", "i", "!")],
        [named("content_block_stop", index=0)],
        [named("message_delta", delta=_STOP, usage=MESSAGES_USAGE)],
        [named("message_stop")],
    ),
    RESPONSES: (
        [named("response.created", response={**_RESPONSE, "usage": None})],
        [named("response.output_text.delta", output_index=0, delta=text) for text in "Hi!"],
        [named("response.output_text.done", output_index=0, text="Hi!")],
        [named("response.completed", response=_DONE)],
        [],
    ),
}
_CHOICE, _ANSWER = {"index": 0, "finish_reason": "stop"}, {"role": "assistant", "content": "Hi!"}
_CONTENT = [{"type": "text", "text": "Hi!"}]
WHOLE: Mapping[str, dict[str, Any]] = {
    CHAT: {"id": "c-1", "choices": [{**_CHOICE, "message": _ANSWER}], "usage": OPENAI_USAGE},
    COMPLETIONS: {"id": "t-1", "choices": [{**_CHOICE, "text": "Hi!"}], "usage": OPENAI_USAGE},
    MESSAGES: {**_MESSAGE, "content": _CONTENT, "stop_reason": "end_turn", "usage": MESSAGES_USAGE},
    RESPONSES: {**_DONE, "status": "completed"},
}
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 8},
    MESSAGES: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
    RESPONSES: {"input": "Hello", "max_output_tokens": 8},
}
PATHS = tuple(BODIES)


def stream_of(path: str) -> list[bytes]:
    return [each for part in STREAMS[path] for each in part]


def compact(document: Mapping[str, Any]) -> bytes:
    """As no encoder of ours would write it: with odd spaces, which must pass."""
    return json.dumps(document, indent=1, separators=(" , ", " :  ")).encode()


def body(path: str, **more: Any) -> dict[str, Any]:
    return {"model": "up", **BODIES[path], **more}


def joined(events: Iterable[bytes]) -> bytes:
    return b"".join(events)
