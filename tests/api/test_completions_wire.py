"""Text completions as clients see them: prompts of every kind, echo, n, logprobs, streams."""

import json

import pytest

from tests.api.test_chat_wire import events
from tests.support.wire import Script

TEXT = "/v1/completions"


async def test_an_answer_has_openais_shape(client, house):
    house.engine.script = Script(answer="fine")
    answer = (await client.post(TEXT, json={"model": "bytes", "prompt": "how?"})).json()
    assert answer["id"].startswith("cmpl-")
    assert ("text_completion", "bytes") == (answer["object"], answer["model"])
    choice = {"index": 0, "text": "fine", "logprobs": None, "finish_reason": "stop"}
    assert [choice] == answer["choices"]
    assert (4, 5) == (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cde"], ["ab", "cde"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
async def test_prompts_are_texts_or_token_ids(client, prompt, texts):
    answer = (await client.post(TEXT, json={"model": "bytes", "prompt": prompt})).json()
    assert texts == [choice["text"] for choice in answer["choices"]]
    assert sum(map(len, texts)) == answer["usage"]["prompt_tokens"]


async def test_choices_are_numbered_by_prompt_and_sequence(client, house):
    body = {"model": "bytes", "prompt": ["ab", "c"], "n": 2, "echo": True}
    answer = (await client.post(TEXT, json=body)).json()
    assert ["abab", "abab", "cc", "cc"] == [choice["text"] for choice in answer["choices"]]
    assert [0, 1, 2, 3] == [choice["index"] for choice in answer["choices"]]
    assert 3 == answer["usage"]["prompt_tokens"]  # a prompt is counted once, whatever n
    assert 2 == len(house.engine.requests)
    assert 1 == len(house.meter.charges)


async def test_without_max_tokens_sixteen_come(client, house):
    house.engine.script = Script(answer="x" * 50)
    answer = (await client.post(TEXT, json={"model": "bytes", "prompt": "p"})).json()
    assert ("x" * 16, "length") == (
        answer["choices"][0]["text"],
        answer["choices"][0]["finish_reason"],
    )


async def test_logprobs_come_by_column(client, house):
    house.engine.script = Script(answer="hé")
    body = {"model": "bytes", "prompt": "p", "logprobs": 2, "max_tokens": 1}
    told = (await client.post(TEXT, json=body)).json()["choices"][0]["logprobs"]
    assert {
        "tokens": ["h"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"h": -0.5, "A": -1.5}],
        "text_offset": [0],
    } == told


async def test_a_stream_echoes_first_and_keeps_offsets(client, house):
    house.engine.script = Script(answer="xyz")
    body = {"model": "bytes", "prompt": "pq", "stream": True, "logprobs": 0}
    *chunks, done = events((await client.post(TEXT, json=body)).text)
    offsets = [
        offset
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for offset in chunk["choices"][0]["logprobs"]["text_offset"]
    ]
    assert [0, 1, 2, 3] == offsets
    assert "xyz" == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert done == "[DONE]"
    echoed = {"model": "bytes", "prompt": "pq", "stream": True, "echo": True}
    first, *_ = events((await client.post(TEXT, json=echoed)).text)
    assert "pq" == first["choices"][0]["text"]


async def test_an_echoed_prompt_has_its_logprobs(house, client):
    """As evaluation harnesses ask for a text's likelihood; with `max_tokens` 0 nothing else."""
    for limit, text in ((0, "abc"), (2, "abcab")):
        body = {"model": "bytes", "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": limit}
        answer = (await client.post("/v1/completions", json=body)).json()
        [choice] = answer["choices"]
        assert (text, "length") == (choice["text"], choice["finish_reason"])
        told = choice["logprobs"]
        assert list(text) == told["tokens"]
        assert [None, -0.25, -0.25] == told["token_logprobs"][:3]
        assert [None, {"b": -0.25}, {"c": -0.25}] == told["top_logprobs"][:3]
        assert list(range(len(text))) == told["text_offset"]
        assert limit == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_text_offsets_are_of_characters(client, house, stream):
    """The tokens of one character begin where it does, and none begins past the text."""
    house.engine.script = Script(answer="a\u6771b")
    asked = {"model": "bytes", "prompt": "hi", "logprobs": 1, "max_tokens": 9, "stream": stream}
    answer = await client.post("/v1/completions", json=asked)
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        told = [json.loads(line)["choices"][0]["logprobs"] for line in lines[:-1]]
        offsets = [offset for each in told if each for offset in each["text_offset"]]
    else:
        offsets = answer.json()["choices"][0]["logprobs"]["text_offset"]
    assert [0, 1, 1, 1, 2, 3] == offsets  # the last ends the sequence
