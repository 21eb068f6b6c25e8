"""A request under way when its tenant is purged: it is answered, and nothing of it stays."""

import asyncio
import threading
from typing import Any

import pytest

from api.requests.kept import owner_of
from engine.structure import GrammarSource
from tests.api.conftest import begun, running
from tests.api.test_structured_wire import Compiled, RecordingCompiler
from tests.support.wire import FakeHouse, Script, fake_house

SAID = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": SAID, "max_tokens": 99},
}


def purge(house: FakeHouse) -> None:
    """As the service purges the tenant of the latest request."""
    wire, owner = house.wire, owner_of(house.wire.access.salts.of_tenant("default"))
    wire.records.purges.note(owner)
    for store in (wire.records.responses, wire.records.conversations):
        store.forget(owner)


def kept(house: FakeHouse) -> tuple[int, int]:
    records = house.wire.records
    return records.conversations.num_tokens, records.responses.num_bytes


@pytest.mark.parametrize("path", ASKED)
async def test_what_was_under_way_is_answered_and_not_remembered(path):
    house = fake_house()
    house.engine.script = Script(answer="one two three", step_s=0.02)
    body = {"model": "bytes"} | ASKED[path]
    async with running(house) as (_, client):
        asked = asyncio.create_task(client.post(path, json=body))
        await begun(house, tokens=2)
        purge(house)
        answer = await asked
        assert (200, True) == (answer.status_code, "one two three" in answer.text)
        assert (0, 0) == kept(house)
        if path == "/v1/responses":
            gone = await client.get(f"{path}/{answer.json()['id']}")
            assert 404 == gone.status_code
        assert 200 == (await client.post(path, json=body)).status_code
        assert (0, 0) != kept(house), "what came after the purge is remembered"


async def test_what_had_not_reached_the_engine_is_computed_without_the_cache():
    class Slow(RecordingCompiler):
        begun, go_on = threading.Event(), threading.Event()

        def compile(self, source: GrammarSource) -> Compiled:
            self.begun.set()
            assert self.go_on.wait(20)
            return super().compile(source)

    slow = Slow()
    body = {"model": "bytes", "messages": SAID, "response_format": {"type": "json_object"}}
    house = fake_house(grammars=slow)
    async with running(house) as (_, client):
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        assert await asyncio.to_thread(slow.begun.wait, 20)
        purge(house)
        slow.go_on.set()
        assert 200 == (await asked).status_code
        assert 200 == (await client.post("/v1/chat/completions", json=body)).status_code
        assert [False, True] == [request.cache for request in house.engine.requests]
