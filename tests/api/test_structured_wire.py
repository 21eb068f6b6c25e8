"""The fields that say what an answer must look like: OpenAI's, vLLM's and SGLang's."""

import json
import threading

import pytest

from engine.errors import InvalidParameter, StructureUnavailable
from tests.api.conftest import refusal, running
from tests.api.real_service import served
from tests.api.test_chat_wire import events
from tests.support.wire import fake_house

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRICT = {"name": "x", "strict": True, "schema": SCHEMA}
RULE = '"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}'


class Compiled:
    """Stands for a compiled grammar; the scripted engine ignores it."""

    def __init__(self, source):
        self.source = source

    def begin(self, min_tokens):
        raise AssertionError


class RecordingCompiler:
    def __init__(self):
        self.sources = []
        self.threads = set()
        self.refuse = None

    def compile(self, source):
        self.threads.add(threading.current_thread().name)
        if self.refuse is not None:
            raise self.refuse
        self.sources.append(source)
        return Compiled(source)


def chat(**fields):
    return {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]} | fields


async def ask(compiler, *bodies):
    house = fake_house(grammars=compiler)
    async with running(house) as (_, client):
        answers = [await client.post(CHAT, json=body) for body in bodies]
        for request in house.engine.requests:
            assert request.grammar is not None
        return answers


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "start: %json "),
        ({"response_format": {"type": "json_schema", "json_schema": STRICT}}, RULE),
        ({"structured_outputs": {"json": SCHEMA}}, RULE),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, RULE),
        ({"structured_outputs": {"regex": "a+"}}, "start: /a+/"),
        ({"structured_outputs": {"choice": ["é", 'b"']}}, 'CHOICE: "é" | "b\\""'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, 'T0: "a"'),
        ({"structured_outputs": {"json_object": True}}, "start: %json "),
    ],
)
async def test_every_field_comes_to_the_compiler_off_the_loop(fields, text):
    compiler = RecordingCompiler()
    [answer] = await ask(compiler, chat(**fields))
    assert 200 == answer.status_code
    [source] = compiler.sources
    assert text in source.text
    assert all(name.startswith("cachesvc-encode") for name in compiler.threads)


async def test_a_grammar_the_compiler_refuses_is_a_client_error_and_holds_no_money():
    compiler = RecordingCompiler()
    compiler.refuse = InvalidParameter("regex: the parenthesis is not closed", param="regex")
    house = fake_house(grammars=compiler)
    async with running(house) as (_, client):
        answer = await client.post(CHAT, json=chat(structured_outputs={"regex": "(a"}))
        assert (400, "invalid_value") == refusal(answer)
        compiler.refuse = StructureUnavailable("install llguidance")
        answer = await client.post(CHAT, json=chat(structured_outputs={"regex": "(a"}))
        assert "unsupported_parameter" == answer.json()["error"]["code"]
        assert [] == house.meter.charges == house.engine.requests


async def test_a_grammar_too_ambiguous_to_follow_is_its_senders_fault(tmp_path, tiny):
    """It compiles, and matching takes longer with each token of the answer."""
    asked = {"max_tokens": 900, "min_tokens": 800, "temperature": 1.0, "seed": 1}
    asked["structured_outputs"] = {"grammar": 'root ::= root root root | "a" | "b"'}
    body = chat(model=str(tiny), **asked)
    async with served(tmp_path, tiny) as (_, client):
        answer = await client.post("/v1/chat/completions", json=body, timeout=120)
    assert 400 == answer.status_code, answer.text
    assert "the grammar is too ambiguous" in answer.json()["error"]["message"]


@pytest.mark.parametrize("logprobs", [False, True])  # with them no token is forced
async def test_a_stream_never_has_half_a_character(tmp_path, tiny, logprobs):
    """Each token of the model is a byte, so that characters with the same first bytes part within
    one."""
    words = ["日本", "旦本", "中国", "😀", "😁é", "a"]
    wanted = [
        ({"json": {"enum": words}}, {f'"{word}"' for word in words}),
        ({"choice": words}, set(words)),
        ({"regex": "(東京|大阪|[😀😁])"}, {"東京", "大阪", "😀", "😁"}),
    ]
    async with served(tmp_path, tiny) as (_, client):
        for seed in range(8):
            for fields, answers in wanted:
                asked = {"stream": True, "seed": seed, "logprobs": logprobs, "max_tokens": 50}
                body = chat(model=str(tiny), **asked, structured_outputs=fields)
                *chunks, done = events((await client.post(CHAT, json=body, timeout=60)).text)
                texts = [one["choices"][0]["delta"].get("content") or "" for one in chunks]
                assert ("[DONE]", "stop") == (done, chunks[-1]["choices"][0]["finish_reason"])
                assert "".join(texts) in answers, texts
