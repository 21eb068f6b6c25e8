"""Content digests on the wire: what reaches the engine and what is refused."""

from typing import Any

import pytest

from tiers.blocks.contents import Content

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CAT, DOG = "ca" * 32, "d0" * 32


def asking(*contents: dict[str, Any], prompt: object = (1, 2, 3, 4, 5, 6), **extension: Any) -> Any:
    given = list(prompt) if isinstance(prompt, tuple) else prompt
    return {"model": "bytes", "prompt": given, "cachesvc": {"contents": contents, **extension}}


async def test_contents_reach_the_engine_in_order(client, house):
    body = asking(
        {"start": 4, "length": 2, "digest": DOG.upper()},
        {"start": 1, "length": 2, "digest": CAT, "kind": "exact"},
    )
    assert 200 == (await client.post(TEXT, json=body)).status_code
    expected = (Content(1, 2, bytes.fromhex(CAT)), Content(4, 2, bytes.fromhex(DOG)))
    assert expected == house.engine.requests[0].contents


async def test_contents_of_several_prompts_and_of_a_chat(client, house):
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
    ],
)
async def test_what_is_wrong_is_refused_by_name(client, contents, param, said):
    response = await client.post(TEXT, json=asking(*contents))
    error = response.json()["error"]
    assert (400, f"cachesvc.{param}") == (response.status_code, error["param"])
    assert said in error["message"]
