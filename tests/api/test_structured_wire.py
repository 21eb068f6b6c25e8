"""The fields that say what an answer must look like: OpenAI's, vLLM's and SGLang's."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.errors import Overloaded
from api.requests.grammars import MAX_PENDING, NUM_THREADS, GrammarPool
from engine.errors import InvalidParameter, StructureUnavailable
from engine.structure import GrammarSource, SourceKind
from tests.api.conftest import running
from tests.api.real_service import served
from tests.support.models import save_tiny_model
from tests.support.wire import FakeHouse, fake_house

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


class Compiled:
    """Stands for a compiled grammar; the scripted engine ignores it."""

    def __init__(self, source: GrammarSource) -> None:
        self.source = source

    def begin(self, min_tokens: int) -> Any:
        raise AssertionError


class RecordingCompiler:
    def __init__(self) -> None:
        self.sources: list[GrammarSource] = []
        self.threads: set[str] = set()
        self.refuse: Exception | None = None

    def known(self, source: GrammarSource, owner: str) -> Compiled | None:
        return Compiled(source) if source in self.sources else None

    def compile(self, source: GrammarSource, owner: str) -> Compiled:
        self.threads.add(threading.current_thread().name)
        if self.refuse is not None:
            raise self.refuse
        self.sources.append(source)
        return Compiled(source)


def chat(**fields: object) -> dict[str, object]:
    return {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]} | fields


def house_with(compiler: RecordingCompiler) -> tuple[FakeHouse, GrammarPool]:
    desk = GrammarPool(compiler)
    return fake_house(grammars=desk), desk


async def ask(compiler: RecordingCompiler, *bodies: dict[str, object]) -> list[httpx.Response]:
    house, desk = house_with(compiler)
    try:
        async with running(house) as (_, client):
            answers = [await client.post(CHAT, json=body) for body in bodies]
            for request in house.engine.requests:
                assert request.grammar is not None
            return answers
    finally:
        desk.close()


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, SourceKind.JSON_OBJECT, "{}"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            SourceKind.JSON_SCHEMA,
            SCHEMA_TEXT,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, SourceKind.JSON_SCHEMA, SCHEMA_TEXT),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, SourceKind.JSON_SCHEMA, SCHEMA_TEXT),
        ({"structured_outputs": {"regex": "a+"}}, SourceKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["é", 'b"']}}, SourceKind.EBNF, 'root ::= "é" | "b\\""'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, SourceKind.EBNF, 'root ::= "a"'),
        ({"structured_outputs": {"json_object": True}}, SourceKind.JSON_OBJECT, "{}"),
        ({"guided_json": SCHEMA}, SourceKind.JSON_SCHEMA, SCHEMA_TEXT),
        ({"guided_regex": "a+"}, SourceKind.REGEX, "a+"),
        ({"guided_choice": ["a"]}, SourceKind.EBNF, 'root ::= "a"'),
        ({"guided_grammar": 'root ::= "a"'}, SourceKind.EBNF, 'root ::= "a"'),
        ({"regex": "a+"}, SourceKind.REGEX, "a+"),
        ({"ebnf": 'root ::= "a"'}, SourceKind.EBNF, 'root ::= "a"'),
        ({"json_schema": SCHEMA_TEXT}, SourceKind.JSON_SCHEMA, SCHEMA_TEXT),
    ],
)
async def test_every_field_comes_to_the_compiler_once_off_the_loop(
    fields: dict[str, object], kind: SourceKind, text: str
) -> None:
    compiler = RecordingCompiler()
    answers = await ask(compiler, chat(**fields), chat(**fields))
    assert [200, 200] == [answer.status_code for answer in answers]
    assert [GrammarSource(kind, text)] == compiler.sources
    assert all(name.startswith("cachesvc-grammar") for name in compiler.threads)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_json": "{"}, "guided_json"),
        ({"regex": "a", "guided_regex": "b"}, "regex"),
        ({"regex": "a" * 70_000}, "regex"),
    ],
)
async def test_a_wrong_field_is_named(fields: dict[str, object], param: str) -> None:
    [answer] = await ask(RecordingCompiler(), chat(**fields))
    assert (400, param) == (answer.status_code, answer.json()["error"]["param"])


async def test_a_grammar_the_compiler_refuses_is_a_client_error_and_holds_no_money() -> None:
    compiler = RecordingCompiler()
    compiler.refuse = InvalidParameter("regex: the parenthesis is not closed", param="regex")
    house, desk = house_with(compiler)
    async with running(house) as (_, client):
        answer = await client.post(CHAT, json=chat(regex="(a"))
        assert (400, "invalid_value") == (answer.status_code, answer.json()["error"]["code"])
        compiler.refuse = StructureUnavailable("install xgrammar")
        answer = await client.post(CHAT, json=chat(regex="(a"))
        assert "unsupported_parameter" == answer.json()["error"]["code"]
        assert [] == house.meter.charges == house.engine.requests
    desk.close()


async def test_a_tenants_grammars_do_not_delay_anothers() -> None:
    """A few threads compile them; thirty of one tenant wait, and another's first is next."""
    gate, order = threading.Event(), []

    class Slow(RecordingCompiler):
        def known(self, source: GrammarSource, owner: str) -> None:
            return None

        def compile(self, source: GrammarSource, owner: str) -> Compiled:
            assert gate.wait(10)
            order.append(source.text)
            return Compiled(source)

    pool = GrammarPool(Slow())
    greedy = [
        asyncio.create_task(pool.get("greedy", GrammarSource(SourceKind.REGEX, f"g{number}")))
        for number in range(40)
    ]
    await asyncio.sleep(0)
    polite = asyncio.create_task(pool.get("polite", GrammarSource(SourceKind.REGEX, "p")))
    await asyncio.sleep(0)
    gate.set()
    answers = await asyncio.gather(*greedy, polite, return_exceptions=True)
    pool.close()
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert 40 - MAX_PENDING * 3 // 4 == len(refused)
    assert "p" in order[: NUM_THREADS + 2]


async def test_a_grammar_too_ambiguous_to_follow_is_its_senders_fault(tmp_path: Path) -> None:
    """It compiles, and matching takes longer with each token of the answer."""
    save_tiny_model(tmp_path / "tiny")
    body = {
        "model": str(tmp_path / "tiny"),
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 900,
        "temperature": 1.0,
        "seed": 1,
        "guided_grammar": 'root ::= s\ns ::= s s s s | "a" | "" | [^b]*',
    }
    async with served(tmp_path / "data", tmp_path / "tiny") as (_, client):
        answer = await client.post("/v1/chat/completions", json=body, timeout=120)
    assert 400 == answer.status_code, answer.text
    assert "the grammar is too ambiguous" in answer.json()["error"]["message"]
