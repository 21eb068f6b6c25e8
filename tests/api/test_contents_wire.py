"""Content digests on the wire: what reaches the engine, what is refused, what is approximate."""

from typing import Any

import httpx
import pytest

from api.access.auth import Salts
from api.collaborators import WireSettings
from api.testing import FakeHouse, Script, fake_house
from tests.api.conftest import running
from tiers.blocks.contents import Content

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CAT, DOG = "ca" * 32, "d0" * 32


def asking(*contents: dict[str, Any], prompt: object = (1, 2, 3, 4, 5, 6), **extension: Any) -> Any:
    given = list(prompt) if isinstance(prompt, tuple) else prompt
    return {"model": "bytes", "prompt": given, "cachesvc": {"contents": contents, **extension}}


async def test_contents_reach_the_engine_in_order(
    client: httpx.AsyncClient, house: FakeHouse
) -> None:
    body = asking(
        {"start": 4, "length": 2, "digest": DOG.upper()},
        {"start": 1, "length": 2, "digest": CAT, "kind": "exact"},
    )
    answer = (await client.post(TEXT, json=body)).json()
    assert "approximate_cached_tokens" not in answer["usage"]["prompt_tokens_details"]
    expected = (Content(1, 2, bytes.fromhex(CAT)), Content(4, 2, bytes.fromhex(DOG)))
    assert expected == house.engine.requests[0].contents


async def test_contents_of_several_prompts_and_of_a_chat(
    client: httpx.AsyncClient, house: FakeHouse
) -> None:
    one = {"start": 0, "length": 2, "digest": CAT, "prompt": 1}
    assert 200 == (await client.post(TEXT, json=asking(one, prompt=[[1], [2, 3]]))).status_code
    chat = {
        "model": "bytes",
        "messages": [{"role": "user", "content": "look: ######"}],
        "cachesvc": {"contents": [{"start": 12, "length": 6, "digest": CAT}]},
    }
    assert 200 == (await client.post(CHAT, json=chat)).status_code
    assert [(), (Content(0, 2, bytes.fromhex(CAT)),), (Content(12, 6, bytes.fromhex(CAT)),)] == [
        request.contents for request in house.engine.requests
    ]


@pytest.mark.parametrize(
    ("contents", "param", "said"),
    [
        ([{"start": 5, "length": 2, "digest": CAT}], "contents[0]", "covers tokens 5 to 7"),
        (
            [
                {"start": 0, "length": 3, "digest": CAT},
                {"start": 2, "length": 3, "digest": DOG},
            ],
            "contents[1]",
            "before the one ahead ends at 3",
        ),
        ([{"start": 0, "length": 1, "digest": "ab"}], "contents[0].digest", "32 hex digits"),
        ([{"start": 0, "length": 1, "digest": "abc"}], "contents[0].digest", "match"),
        ([{"start": 0, "length": 1, "digest": "xy" * 16}], "contents[0].digest", "match"),
        ([{"start": 0, "length": 0, "digest": CAT}], "contents[0].length", "greater than"),
        ([{"start": -1, "length": 1, "digest": CAT}], "contents[0].start", "greater than"),
        ([{"length": 1, "digest": CAT}], "contents[0].start", "required"),
        ([{"start": 0, "length": 1, "digest": CAT, "kind": "vague"}], "contents[0].kind", "exact"),
        ([{"start": 0, "length": 1, "digest": CAT, "prompt": 1}], "contents[0].prompt", "has 1"),
        (
            [{"start": 0, "length": 1, "digest": "ab", "kind": "perceptual"}],
            "contents[0].kind",
            "cache.perceptual_digests",
        ),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    client: httpx.AsyncClient, contents: list[dict[str, Any]], param: str, said: str
) -> None:
    response = await client.post(TEXT, json=asking(*contents))
    error = response.json()["error"]
    assert (400, f"cachesvc.{param}") == (response.status_code, error["param"])
    assert said in error["message"]


async def test_hits_behind_a_perceptual_digest_are_labelled_approximate() -> None:
    house = fake_house(settings=WireSettings(perceptual_digests=True))
    like = {"start": 2, "length": 2, "digest": "ab" * 8, "kind": "perceptual"}
    async with running(house) as (_, client):
        for hits, approximate in ((0, 0), (1, 0), (5, 3)):
            house.engine.script = Script(hits={"hit_device": hits})
            answer = (await client.post(TEXT, json=asking(like))).json()
            details = answer["usage"]["prompt_tokens_details"]
            assert (hits, approximate) == (
                details["cached_tokens"],
                details["approximate_cached_tokens"],
            )
        streamed = asking(like) | {"stream": True, "stream_options": {"include_usage": True}}
        text = (await client.post(TEXT, json=streamed)).text
        assert '"approximate_cached_tokens":3' in text
        assert house.engine.requests[0].contents[0].perceptual


async def test_what_is_approximate_is_not_shared_between_tenants() -> None:
    salts = Salts(b"secret", {"everyone": frozenset({"*"})})
    house = fake_house(settings=WireSettings(perceptual_digests=True), salts=salts)
    like = {"start": 2, "length": 2, "digest": "ab" * 8, "kind": "perceptual"}
    async with running(house) as (_, client):
        response = await client.post(TEXT, json=asking(like, share="everyone"))
        error = response.json()["error"]
        assert (400, "cachesvc.contents[0].kind") == (response.status_code, error["param"])
        assert "not shared between tenants" in error["message"]
        assert [] == house.engine.requests
