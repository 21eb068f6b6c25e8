"""What HTTP allows and clients get wrong: long bodies, headers said twice, odd paths."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import pytest

from api.access.body_bound import BODIES_AT_ONCE
from api.collaborators import WireSettings
from tests.api.conftest import GateOf, begun, refusal, running
from tests.api.driver import Visit
from tests.support.admin import fake_parts
from tests.support.wire import Script, fake_house

CHAT = "/v1/chat/completions"
HELLO = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BOUND = 1000


@pytest.fixture
def house():
    return fake_house(settings=WireSettings(max_body_bytes=BOUND))


@pytest.fixture
async def client(house):
    async with running(house, admin=fake_parts()) as (_, client):
        yield client


@pytest.mark.parametrize(
    ("path", "kind"),
    [(path, "application/json") for path in (CHAT, "/tokenize", "/admin/api/tenants")]
    + [("/admin/login", "application/x-www-form-urlencoded")],
)
async def test_no_route_reads_a_body_beyond_the_bound(client, path, kind):
    """Nor do those whose body FastAPI reads before the sender is identified."""
    num_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        while num_read < 100 * BOUND:
            num_read += 100
            yield b"y" * 100

    headers = {"content-type": kind, "host": "localhost", "origin": "http://localhost"}
    for content in (b"x" * (BOUND + 1), endless()):
        answer = await client.post(path, content=content, headers=headers)
        assert (413, "request_too_large") == refusal(answer)
        assert "server.max_body_bytes" in answer.json()["error"]["message"]
        assert "close" == answer.headers["connection"]
    assert BOUND < num_read <= BOUND + 200


async def test_all_bodies_together_are_bounded_and_tenants_share_the_room():
    """A tenant's bodies that are still on their way leave room for another tenant's."""
    house = fake_house(
        gatekeeper=GateOf(*["greedy"] * 20 + ["polite"]),
        settings=WireSettings(max_body_bytes=BOUND),
    )
    go_on = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        body = json.dumps(HELLO).encode()
        yield body + b" " * (BOUND - len(body) - 10)
        await go_on.wait()
        yield b" " * 10

    async with running(house) as (_, client):
        sending = [asyncio.create_task(client.post(CHAT, content=half())) for _ in range(20)]
        await asyncio.sleep(0.1)
        refused = [task.result() for task in sending if task.done()]
        assert [503] * (20 - 3 * BODIES_AT_ONCE // 4) == [one.status_code for one in refused]
        assert {"1"} == {one.headers["retry-after"] for one in refused}
        assert 200 == (await client.post(CHAT, json=HELLO)).status_code
        go_on.set()
        answers = await asyncio.gather(*sending)
        assert 3 * BODIES_AT_ONCE // 4 == [one.status_code for one in answers].count(200)


async def test_a_body_that_was_read_leaves_its_room_while_its_answer_runs():
    house = fake_house(settings=WireSettings(max_body_bytes=BOUND))
    house.engine.script = Script(stall=True)
    async with running(house) as (app, _):
        visits = []
        for _ in range(40):
            visits.append(Visit(app, CHAT, HELLO | {"user": "x" * 800}).start())
            await asyncio.sleep(0.001)
        await begun(house, requests=40)
        assert 40 == len(house.engine.requests), "the room is enough for 16 bodies at once"
        for visit in visits:
            visit.leave()
        await asyncio.gather(*(visit.task for visit in visits))


@pytest.mark.parametrize("name", ["Authorization", "Idempotency-Key"])
async def test_a_header_that_decides_who_pays_is_read_one_way_only(house, client, name):
    twice = [(name, "Bearer one"), (name.lower(), "Bearer two")]
    answer = await client.post(CHAT, json=HELLO, headers=twice)
    assert (400, "invalid_value") == refusal(answer)
    assert f"{name} was sent 2 times" in answer.json()["error"]["message"]
    assert [] == house.engine.requests


@pytest.mark.parametrize(
    ("count", "is_retry"),
    [("1", True), ("02", True), ("9" * 5000, True)]
    + [(count, False) for count in ("0", "00", "", "-1", "1.5", "\xb2", "1 2")],
)
async def test_what_a_client_says_of_its_retries_never_fails_a_request(
    house, client, count, is_retry
):
    headers = {b"x-stainless-retry-count": count.encode("latin-1")}
    answer = await client.post(CHAT, json=HELLO, headers=headers)
    assert 200 == answer.status_code
    assert is_retry is house.meter.last.job.context.is_retry


async def test_a_client_leaving_while_sending_is_not_a_server_error(house, client, caplog):
    app, sent = client._transport.app, []  # type: ignore[attr-defined]
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def receive() -> dict[str, object]:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: object) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"",
        "server": ("test", 80), "client": ("test", 1), "scheme": "http", "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    assert ([], []) == (sent, [line for line in caplog.records if line.levelname == "ERROR"])


async def test_a_path_with_a_slash_too_many_does_not_exist(client):
    """A redirect would name the Host header's host, and send a prompt there in plain text."""
    answer = await client.post(f"{CHAT}/", json=HELLO)
    assert (404, "not_found") == refusal(answer)
    page = await client.get("/admin/", headers={"accept": "text/html"})
    assert (303, "/admin/login?next=/admin/") == (page.status_code, page.headers["location"])


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_compressed_body_and_a_wrong_method_are_refused_as_the_clients_fault(client, path):
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = await client.post(path, content=gzip.compress(b"{}"), headers=headers)
    told = answer.json()["error"]
    assert (415, "unsupported_encoding") == (answer.status_code, told["code"])
    assert "'gzip'; send it uncompressed" in told["message"]
    answer = await client.put(path, json={})
    assert (405, "invalid_request_error") == (answer.status_code, answer.json()["error"]["type"])
