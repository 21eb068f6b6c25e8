"""Images on the wire: refused by name in every protocol and place, and no address is opened."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNTS = {CHAT: "/tokenize", MESSAGES: "/v1/messages/count_tokens"}
URL = "data:image/png;base64,iVBORw0KG"

OF_CHAT = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
OF_RESPONSES = {"type": "input_image", "image_url": URL, "detail": "auto"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KG"}
OF_MESSAGES = {"type": "image", "source": SOURCE}
MARKED = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def chat(*messages: Any) -> dict[str, Any]:
    return {"model": "bytes", "messages": [*messages]}


def said(role: str, *parts: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [*parts], **more}


def text(kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": "What is it?"}


def input_of(*items: Any) -> dict[str, Any]:
    return {"model": "bytes", "input": [*items]}


CALLED = said("assistant", {"type": "tool_use", "id": "t1", "name": "f", "input": {}})
DOCUMENT = {"type": "document", "source": {"type": "content", "content": [OF_MESSAGES]}}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": [*content]}


ASKED = text("input_text")
CALL = {"type": "function_call", "name": "f", "call_id": "1", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": [OF_RESPONSES]}
WHO, DEEP = said("user", text()), "messages[2].content[0].content[0].source.content[0]"
PLACES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, chat(said("user", text(), OF_CHAT)), "messages[0].content[1]"),
    (CHAT, chat(said("user", OF_CHAT), WHO), "messages[0].content[0]"),
    (CHAT, chat(said("system", OF_CHAT), WHO), "messages[0].content[0]"),
    (CHAT, chat(WHO, said("assistant", OF_CHAT)), "messages[1].content[0]"),
    (CHAT, chat(WHO, said("tool", text(), OF_CHAT, tool_call_id="1")), "messages[1].content[1]"),
    (MESSAGES, chat(said("user", text(), OF_MESSAGES)), "messages[0].content[1]"),
    (MESSAGES, chat(WHO, CALLED, said("user", result(DOCUMENT))), DEEP),
    (RESPONSES, input_of(said("user", ASKED, OF_RESPONSES)), "input[0].content[1]"),
    (RESPONSES, input_of(said("user", ASKED | MARKED, OF_RESPONSES)), "input[0].content[1]"),
    (RESPONSES, input_of(said("developer", OF_RESPONSES)), "input[0].content[0]"),
    (RESPONSES, input_of(CALL, OUTPUT), "input[1].output[0]"),
]


@pytest.mark.parametrize(("path", "body", "place"), PLACES)
async def test_an_image_is_refused_by_its_place_with_what_to_do(client, house, path, body, place):
    more = {"max_tokens": 9} if path == MESSAGES else {}
    for at, asked in ((path, body | more), (COUNTS.get(path, path), body)):
        refused = await client.post(at, json=asked)
        told = refused.json()["error"]
        assert (400, place) == (refused.status_code, told["param"]), refused.text
        assert f"{place} is of type 'i" in told["message"]
        assert "this model reads text only" in told["message"]
        assert "an engine at a URL (docs/vllm.md)" in told["message"]
    assert not house.engine.requests


def _bodies_with(address: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each place of a request in which some server somewhere reads a URL."""
    schema = {"type": "object", "properties": {"a": {"$ref": address}}}
    tool = {"name": "f", "parameters": schema}
    strict = {"name": "s", "strict": True, "schema": schema}
    of_chat = [
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "video_url", "video_url": {"url": address}},
        {"type": "input_audio", "input_audio": {"data": address, "format": "wav"}},
        {"type": "file", "file": {"file_id": address}},
    ]
    for part in of_chat:
        yield CHAT, chat(said("user", text(), part))
    asked = chat(said("user", text()))
    yield CHAT, asked | {"response_format": {"type": "json_schema", "json_schema": strict}}
    functions = [{"type": "function", "function": tool}]
    yield CHAT, asked | {"tools": functions, "tool_choice": "required"}
    by_url = {"type": "url", "url": address}
    for kind in ("image", "document"):
        turn = said("user", {"type": kind, "source": by_url})
        yield MESSAGES, chat(turn) | {"max_tokens": 9}
    of_responses = [
        {"type": "input_image", "image_url": address},
        {"type": "input_file", "file_url": address},
    ]
    for part in of_responses:
        yield RESPONSES, input_of(said("user", part))
    server = {"type": "mcp", "server_label": "s", "server_url": address}
    yield RESPONSES, {"model": "bytes", "input": "hi", "tools": [server]}


@pytest.mark.parametrize("host", ["127.0.0.1", "0x7f.1", "rebound.example"])
async def test_no_address_in_a_request_is_looked_up_or_opened(client, monkeypatch, host):
    """So it matters to nobody how an address is written, redirected or resolved."""
    asked: list[Any] = []

    def refused(*address: Any, **_: Any) -> None:
        asked.append(address)
        raise OSError("no network")

    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    for path, body in _bodies_with(f"http://{host}:9/latest/meta-data"):
        answer = await client.post(path, json=body)
        assert 400 == answer.status_code, (body, answer.text)
    assert [] == asked
