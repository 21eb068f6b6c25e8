"""Chats and text completions as clients see them, JSON and server-sent events."""

import json

import pytest

from engine.request import FinishReason
from tests.api.bank import CHAT, HELLO, PROMPT_TOKENS
from tests.api.conftest import of
from tests.support.wire import Script


def events(text: str) -> list[dict | str]:
    """The data of each event; `[DONE]` stays a string."""
    data = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def test_an_answer_has_openais_shape_and_its_hits_and_misses_make_up_the_prompt(
    client, house
):
    hits = {"hit_device": 4, "hit_host": 3, "hit_disk": 2}
    house.engine.script = Script(answer="hello", hits=hits)
    answer = (await client.post(CHAT, json=HELLO)).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert {
        "object": "chat.completion",
        "model": "bytes",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": len("hello") + 1,  # the end token counts
            "total_tokens": PROMPT_TOKENS + 6,
            "prompt_cache_hit_tokens": 9,
            "prompt_cache_miss_tokens": PROMPT_TOKENS - 9,
            "prompt_tokens_details": {
                "cached_tokens": 9,
                "cache_write_tokens": 0,
                "cached_tokens_details": {"device": 4, "host": 3, "disk": 2},
            },
        },
    } == answer
    house.engine.script = Script(answer="x", hits={"hit_remote": 5})
    usage = (await client.post(CHAT, json=HELLO)).json()["usage"]
    tiers = usage["prompt_tokens_details"]["cached_tokens_details"]
    assert {"device": 0, "host": 0, "disk": 0, "remote": 5} == tiers, "named where it served"


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_opens_with_the_role_and_closes_with_done(client, house, include_usage):
    """The usage that is asked for is a last chunk without choices."""
    house.engine.script = Script(answer="héllo")
    body = HELLO | {"stream": True, "stream_options": {"include_usage": include_usage}}
    response = await client.post(CHAT, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert {"chat.completion.chunk"} == {chunk["object"] for chunk in chunks}
    assert len({chunk["id"] for chunk in chunks}) == 1
    if include_usage:
        last = chunks.pop()
        assert ([], PROMPT_TOKENS + 7) == (last["choices"], last["usage"]["total_tokens"])
    told = [None] * len(chunks) if include_usage else []
    assert told == [chunk["usage"] for chunk in chunks if "usage" in chunk]
    [choices] = zip(*(chunk["choices"] for chunk in chunks), strict=True)
    assert {"role": "assistant", "content": ""} == choices[0]["delta"]
    assert "héllo" == "".join(choice["delta"].get("content", "") for choice in choices)
    finishes = [choice["finish_reason"] for choice in choices]
    assert [None] * (len(chunks) - 1) + ["stop"] == finishes


async def test_a_stop_string_ends_the_answer_and_is_not_in_it(client, house):
    house.engine.script = Script(answer="one two three", step_s=0.001)
    answer = (await client.post(CHAT, json=HELLO | {"stop": ["zzz", " two"]})).json()
    assert answer["choices"][0]["message"]["content"] == "one"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("one two")
    assert [FinishReason.STOP] == [reason for _, reason, _ in house.engine.aborts]
    house.engine.script = Script(answer="one two three", tokens_per_step=100)
    answer = (await client.post(CHAT, json=HELLO | {"stop": " two"})).json()
    assert answer["usage"]["completion_tokens"] == len("one two"), "of the same step"


async def test_max_completion_tokens_ends_with_length(client, house):
    house.engine.script = Script(answer="abcdef")
    answer = (await client.post(CHAT, json=HELLO | {"max_completion_tokens": 3})).json()
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_logprobs_come_by_token(client, house):
    house.engine.script = Script(answer="hi")
    body = HELLO | {"logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    content = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert ["h", "i"] == [entry["token"] for entry in content]
    first, second = (
        {"token": token, "logprob": logprob, "bytes": [ord(token)]}
        for token, logprob in (("h", -0.5), ("A", -1.5))
    )
    assert first | {"top_logprobs": [first, second]} == content[0]


async def test_parameters_reach_the_engine(client, house):
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7}
    same |= {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1}
    same |= {"ignore_eos": True, "max_tokens": 9, "min_tokens": 2}
    other = {"logit_bias": {"65": 10}, "stop_token_ids": [66], "user": "someone"}
    other |= {"an_unknown_field": {"is": "accepted"}, "cachesvc": {"cache": False}}
    assert (await client.post(CHAT, json=HELLO | same | other)).status_code == 200
    assert not house.engine.requests[0].cache
    params = house.engine.requests[0].params
    assert same == {name: getattr(params, name) for name in same}
    assert ({65: 10}, (66,)) == (params.logit_bias, params.stop_token_ids)


async def test_nulls_mean_defaults(client, house):
    nulls = dict.fromkeys(["n", "temperature", "stop", "max_tokens", "stream", "logit_bias"])
    assert (await client.post(CHAT, json=HELLO | nulls)).status_code == 200
    assert house.engine.requests[0].cache
    params = house.engine.requests[0].params
    assert (1, 1.0, 4096 - PROMPT_TOKENS) == (params.n, params.temperature, params.max_tokens)


async def test_details_are_given_on_request(client, house):
    plain = (await client.post(CHAT, json=HELLO)).json()
    by_body = (await client.post(CHAT, json=HELLO | {"cachesvc": {"details": True}})).json()
    asked = {"X-Cachesvc": "details, receipt"}
    by_header = (await client.post(CHAT, json=HELLO, headers=asked)).json()
    assert "cachesvc" not in plain
    block = by_body["cachesvc"]
    assert {"absent": PROMPT_TOKENS} == block["miss_reasons"]
    assert {"queue", "load", "ttft", "tpot", "total"} == set(block["timings_ms"])
    assert block["cost"]["amount"] == "0.000012"
    assert "receipt" not in block
    assert "receipt" in by_header["cachesvc"]


TEXT = "/v1/completions"


async def test_a_completion_has_openais_shape(client, house):
    house.engine.script = Script(answer="fine")
    answer = (await client.post(TEXT, json={"model": "bytes", "prompt": "how?"})).json()
    assert answer["id"].startswith("cmpl-")
    assert ("text_completion", "bytes") == (answer["object"], answer["model"])
    choice = {"index": 0, "text": "fine", "logprobs": None, "finish_reason": "stop"}
    assert [choice] == answer["choices"]
    assert (4, 5) == (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])


async def test_prompts_are_texts_or_token_ids(client):
    for prompt, texts in (
        ("ab", ["ab"]),
        (["ab", "cde"], ["ab", "cde"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ):
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
    assert ("x" * 16, "length") == of(answer["choices"][0], "text", "finish_reason")


async def test_logprobs_come_by_column(client, house):
    house.engine.script = Script(answer="hé")
    body = {"model": "bytes", "prompt": "p", "logprobs": 2, "max_tokens": 1}
    told = (await client.post(TEXT, json=body)).json()["choices"][0]["logprobs"]
    columns = of(told, "tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert (["h"], [-0.5], [{"h": -0.5, "A": -1.5}], [0]) == columns


async def test_a_stream_echoes_first(client, house):
    house.engine.script = Script(answer="xyz")
    echoed = {"model": "bytes", "prompt": "pq", "stream": True, "echo": True}
    first, *chunks, done = events((await client.post(TEXT, json=echoed)).text)
    assert ("pq", "[DONE]") == (first["choices"][0]["text"], done)
    assert "xyz" == "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def test_an_echoed_prompt_has_its_logprobs(house, client):
    """As evaluation harnesses ask for a text's likelihood; with `max_tokens` 0 nothing else."""
    for limit, text in ((0, "abc"), (2, "abcab")):
        body = {"model": "bytes", "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": limit}
        answer = (await client.post(TEXT, json=body)).json()
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
    answer = await client.post(TEXT, json=asked)
    parts = events(answer.text)[:-1] if stream else [answer.json()]
    told = [part["choices"][0]["logprobs"] for part in parts]
    offsets = [offset for each in told if each for offset in each["text_offset"]]
    assert [0, 1, 1, 1, 2, 3] == offsets  # the last ends the sequence
