"""Images on the wire: in three protocols, from data and from files; what is refused, and how."""

import base64
import dataclasses
import io
import os
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from api.collaborators import WireSettings
from api.served_model import ServedModel
from engine.errors import InvalidParameter
from engine.models.load import LoadedModel, load_model
from engine.text.detokenizer import IncrementalDetokenizer
from tests.api.conftest import running
from tests.api.test_structured_wire import RecordingCompiler
from tests.support.models import IMAGE, save_tiny_vision_model
from tests.support.wire import FakeHouse, Script, byte_model, fake_house

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_vision_model(folder)
    return load_model(str(folder), device="cpu", dtype="float32", cache_dir=folder)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "images" / "more").mkdir(parents=True)
    return tmp_path / "images"


@pytest.fixture
def house(loaded: LoadedModel, pictures: Path) -> FakeHouse:
    seeing = dataclasses.replace(
        byte_model("eyes"),
        tokenizer=loaded.tokenizer,
        detokenizer=partial(IncrementalDetokenizer, loaded.tokenizer),
        vocab_size=loaded.vocab_size,
        images=loaded.images,
    )
    compiler = RecordingCompiler()
    compiler.refuse = InvalidParameter("no such grammar")
    house = fake_house(
        models=[seeing, byte_model()],
        settings=WireSettings(image_dir=pictures),
        grammars=compiler,
    )
    house.engine.script = Script(answer="A cat.")
    return house


@pytest.fixture
async def client(house: FakeHouse) -> AsyncIterator[httpx.AsyncClient]:
    async with running(house) as (_, client):
        yield client


def png(color: str = "red", size: tuple[int, int] = (50, 40)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image(given: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": given, "detail": "low"}}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "eyes", "messages": [{"role": "user", "content": [*parts]}], **more}


WHAT = {"type": "text", "text": "What is it?"}


async def test_an_image_reaches_the_engine_in_its_place(
    client: httpx.AsyncClient, house: FakeHouse
) -> None:
    body = chat(WHAT, image(url(png())), {"type": "text", "text": " And why?"})
    answer = (await client.post(CHAT, json=body)).json()
    [request] = house.engine.requests
    [picture] = request.pictures
    assert (png(), 5) == (picture.data, picture.num_tiles)
    assert 5 * 4 == request.tokens.count(IMAGE)
    assert [picture.tile_digest(tile) for tile in range(5)] == [c.digest for c in request.contents]
    assert all(
        content.native and {IMAGE} == {*request.tokens[content.start : content.end]}
        for content in request.contents
    )
    assert len(request.tokens) == answer["usage"]["prompt_tokens"]
    asked = (await client.post(TOKENIZE, json=body)).json()
    assert request.tokens.tolist() == asked["tokens"]
    words = bytes(token for token in request.tokens if token < 256).decode()
    assert words.index("What is it?") < words.index("And why?")


async def test_every_protocol_asks_the_same(client: httpx.AsyncClient, house: FakeHouse) -> None:
    data = base64.b64encode(png()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    anthropic = {"role": "user", "content": [WHAT, {"type": "image", "source": source}]}
    said = {"type": "input_text", "text": "What is it?"}
    openai = {"role": "user", "content": [said, {"type": "input_image", "image_url": url(png())}]}
    responses = [
        await client.post(CHAT, json=chat(WHAT, image(url(png())))),
        await client.post(
            "/v1/messages", json={"model": "eyes", "max_tokens": 9, "messages": [anthropic]}
        ),
        await client.post("/v1/responses", json={"model": "eyes", "input": [openai]}),
    ]
    assert [200] * 3 == [response.status_code for response in responses]
    first, *others = house.engine.requests
    for other in others:
        assert (first.tokens, first.contents) == (other.tokens, other.contents)
    more = {"input": "Sure?", "previous_response_id": responses[2].json()["id"]}
    again = await client.post("/v1/responses", json={"model": "eyes", **more})
    assert 200 == again.status_code, again.text
    assert first.pictures == house.engine.requests[-1].pictures
    counted = await client.post(
        "/v1/messages/count_tokens", json={"model": "eyes", "messages": [anthropic]}
    )
    assert len(first.tokens) == counted.json()["input_tokens"]
    asked = await client.post(
        "/v1/responses/input_tokens", json={"model": "eyes", "input": [openai]}
    )
    assert len(first.tokens) == asked.json()["input_tokens"]


async def test_files_of_the_servers_folder_are_read_and_no_others(
    client: httpx.AsyncClient, house: FakeHouse, pictures: Path
) -> None:
    (pictures / "more" / "a cat.png").write_bytes(png())
    (pictures.parent / "secret.png").write_bytes(png("blue"))
    (pictures / "link.png").symlink_to(pictures.parent / "secret.png")
    os.mkfifo(pictures / "pipe.png")
    inside = f"file://{pictures}/more/a%20cat.png"
    assert 200 == (await client.post(CHAT, json=chat(WHAT, image(inside)))).status_code
    assert png() == house.engine.requests[0].pictures[0].data
    for path in (
        f"file://{pictures}/../secret.png",
        f"file://{pictures}/%2e%2e/secret.png",
        f"file://{pictures}/link.png",
        f"file://{pictures}/pipe.png",
        f"file://{pictures}/more",
        f"file://{pictures}/none.png",
        f"file://elsewhere{pictures}/more/a%20cat.png",
        "file:///etc/passwd",
        "file://\0",
    ):
        refused = await client.post(CHAT, json=chat(WHAT, image(path)))
        assert (400, "names no file") == (refused.status_code, _part(refused, "names no file"))


def _part(response: httpx.Response, said: str) -> str:
    return said if said in response.json()["error"]["message"] else response.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("http://example.com/cat.png", "nothing is fetched"),
        ("https://169.254.169.254/latest", "nothing is fetched"),
        ("", "not a data: URL"),
        ("data:image/png,abc", "must be base64"),
        ("data:image/png;base64,a?b=", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "cannot be read as one of PNG"),
        (url(png()[:80]), "cannot be read"),
    ],
)
async def test_an_invalid_image_is_refused_with_its_field(
    client: httpx.AsyncClient, house: FakeHouse, given: str, said: str
) -> None:
    refused = await client.post(CHAT, json=chat(WHAT, image(given)))
    assert 400 == refused.status_code
    assert said in refused.json()["error"]["message"]
    assert "messages[0].content[1].image_url.url" == refused.json()["error"]["param"]
    assert not house.engine.requests


def _bodies_with(address: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each place of a request in which some server somewhere reads a URL."""
    schema = {"type": "object", "properties": {"a": {"$ref": address}}}
    tool = {"name": "f", "parameters": schema}
    strict = {"name": "s", "strict": True, "schema": schema}
    of_chat = [
        image(address),
        {"type": "video_url", "video_url": {"url": address}},
        {"type": "input_audio", "input_audio": {"data": address, "format": "wav"}},
        {"type": "file", "file": {"file_id": address}},
    ]
    for part in of_chat:
        yield CHAT, chat(WHAT, part)
    yield CHAT, chat(WHAT, response_format={"type": "json_schema", "json_schema": strict})
    yield CHAT, chat(WHAT, tools=[{"type": "function", "function": tool}], tool_choice="required")
    by_url = {"type": "url", "url": address}
    for kind in ("image", "document"):
        said = {"role": "user", "content": [{"type": kind, "source": by_url}]}
        yield "/v1/messages", {"model": "eyes", "max_tokens": 9, "messages": [said]}
    asked = [
        {"type": "input_image", "image_url": address},
        {"type": "input_file", "file_url": address},
    ]
    for part in asked:
        yield "/v1/responses", {"model": "eyes", "input": [{"role": "user", "content": [part]}]}
    server = {"type": "mcp", "server_label": "s", "server_url": address}
    yield "/v1/responses", {"model": "eyes", "input": "hi", "tools": [server]}


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0177.0.0.1", "0x7f.1"),
        *("localhost", "169.254.169.254", "rebound.example"),
    ],
)
async def test_no_address_in_a_request_is_looked_up_or_opened(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
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


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (chat(WHAT, image(url(png())), model="bytes"), "sees no images"),
        (chat(*[image(url(png()))] * 17), "17 images"),
        (chat({"type": "text", "text": "<image>"}, image(url(png()))), "leave that out"),
        (
            chat(WHAT, image(url(png())), cachesvc={"contents": []})
            | {"cachesvc": {"contents": [{"start": 0, "length": 1, "digest": "ca" * 16}]}},
            "names itself",
        ),
        (
            {"model": "eyes", "messages": [{"role": "system", "content": [image(url(png()))]}]},
            "in messages of the user",
        ),
        (chat({"type": "image_url"}), "has type 'image_url'"),
        (chat({"type": "input_audio"}), "has type 'input_audio'"),
    ],
    ids=["blind", "many", "mark", "contents", "system", "empty", "audio"],
)
async def test_an_unsupported_option_is_explained(
    client: httpx.AsyncClient, house: FakeHouse, body: Any, said: str
) -> None:
    refused = await client.post(CHAT, json=body)
    assert (400, said) == (refused.status_code, _part(refused, said))
    assert not house.engine.requests


async def test_more_tokens_than_the_context_are_refused_before_they_are_made(
    loaded: LoadedModel,
) -> None:
    small: ServedModel = dataclasses.replace(
        byte_model("eyes", max_context=64), tokenizer=loaded.tokenizer, images=loaded.images
    )
    house = fake_house(models=[small])
    async with running(house) as (_, client):
        refused = await client.post(CHAT, json=chat(*[image(url(png()))] * 4))
    assert (400, "images alone") == (refused.status_code, _part(refused, "images alone"))


async def test_text_alone_to_a_model_that_sees(client: httpx.AsyncClient, house: FakeHouse) -> None:
    for content in ("Hello", [{"type": "text", "text": "Hello"}]):
        body = {"model": "eyes", "messages": [{"role": "user", "content": content}]}
        assert 200 == (await client.post(CHAT, json=body)).status_code
    first, second = house.engine.requests
    assert first.tokens == second.tokens and () == first.pictures
    assert b"Hello" in bytes(token for token in first.tokens if token < 256)
