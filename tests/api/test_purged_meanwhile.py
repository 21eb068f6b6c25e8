"""A request under way when its tenant is purged: it is answered, and nothing of it stays."""

import asyncio
import sqlite3
import threading
from contextlib import closing
from typing import Any

import pytest

from api.requests.kept import owner_of
from cachesvc.operator.purge import RECEIPTS
from cachesvc.server.kept_turns import FILE_NAME
from engine.request import FinishReason
from engine.structure import GrammarSource
from tests.api.conftest import begun, running
from tests.api.real_service import served
from tests.api.test_structured_wire import Compiled, RecordingCompiler
from tests.support.models import save_tiny_model
from tests.support.wire import FakeHouse, Script, fake_house

SAID = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {
        "messages": SAID,
        "max_tokens": 99,
        "diagnostics": {"previous_message_id": None},
    },
}


def purge(house: FakeHouse) -> None:
    """As the service purges the tenant of the latest request."""
    wire, owner = house.wire, owner_of(house.wire.access.salts.of_tenant("default"))
    wire.records.purges.note(owner)
    for store in (wire.records.responses, wire.records.fingerprints, wire.records.conversations):
        store.forget(owner)


def kept(house: FakeHouse) -> tuple[int, int, int]:
    wire = house.wire
    return (
        wire.records.conversations.num_tokens,
        wire.records.responses.num_bytes,
        wire.records.fingerprints.num_bytes,
    )


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
        assert (0, 0, 0) == kept(house)
        if path == "/v1/responses":
            gone = await client.get(f"{path}/{answer.json()['id']}")
            assert 404 == gone.status_code
        assert 200 == (await client.post(path, json=body)).status_code
        assert (0, 0, 0) != kept(house), "what came after the purge is remembered"


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


@pytest.mark.timeout(120)
async def test_a_purge_of_the_real_service_leaves_nothing_of_a_running_request(tmp_path):
    save_tiny_model(tmp_path / "tiny")
    data_dir, model = tmp_path / "data", str(tmp_path / "tiny")
    body = {"model": model, "messages": SAID, "max_tokens": 900, "ignore_eos": True}
    async with served(data_dir, tmp_path / "tiny") as (service, client):
        engine = service.core.engine
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while not engine.stats().num_running:
            await asyncio.sleep(0.001)
        order = {"kind": "tenant", "name": "default", "why": "the customer asked"}
        headers = {"Authorization": f"Bearer {service.dashboard.parts.operator_token}"}
        purged = await client.post("/admin/api/cache/purge", json=order, headers=headers)
        assert 200 == purged.status_code, purged.text
        assert not asked.done()
        [running_id] = engine._intake._in_flight
        engine.abort(running_id, FinishReason.LENGTH)
        answer = await asked
        assert (200, "length") == (answer.status_code, answer.json()["choices"][0]["finish_reason"])
        assert 0 == engine.stats().cache.device.num_blocks
    with closing(sqlite3.connect(data_dir / FILE_NAME)) as file:
        assert [(0,)] == file.execute("SELECT count(*) FROM kept").fetchall()


async def test_a_purge_that_cannot_remove_stored_turns_gives_no_receipt(tmp_path):
    """It was signed while the removal waited for a thread that would have failed."""
    save_tiny_model(tmp_path / "tiny")
    data_dir = tmp_path / "data"
    order = {"kind": "tenant", "name": "default", "why": "the customer asked"}
    body = {"model": str(tmp_path / "tiny"), "messages": SAID, "max_tokens": 2}
    async with served(data_dir, tmp_path / "tiny") as (service, client):
        headers = {"Authorization": f"Bearer {service.dashboard.parts.operator_token}"}
        with closing(sqlite3.connect(data_dir / FILE_NAME, isolation_level=None)) as file:

            def num_stored() -> int:
                return int(file.execute("SELECT count(*) FROM kept").fetchone()[0])

            assert 200 == (await client.post("/v1/chat/completions", json=body)).status_code
            while not num_stored():
                await asyncio.sleep(0.01)
            file.execute(
                "CREATE TRIGGER full BEFORE DELETE ON kept "
                "BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
            )
            refused = await client.post("/admin/api/cache/purge", json=order, headers=headers)
            error = refused.json()["error"]
            assert (409, "purge_failed") == (refused.status_code, error["code"])
            assert "disk is full" in error["message"]
            assert not (data_dir / RECEIPTS).exists()
            file.execute("DROP TRIGGER full")
            purged = await client.post("/admin/api/cache/purge", json=order, headers=headers)
            assert (200, 0) == (purged.status_code, num_stored())
