"""Limits that servers share through a real Redis: windows, places, and a server that was killed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import ConnectionPool, Redis

from api.access.concurrency import Holder, LocalPlaces, Places, RedisPlaces
from api.access.rate_limits import LimitSettings, Quota, WindowLimits, open_limits
from api.errors import RateLimited
from billing.keys import Principal
from billing.usage import Usage
from tests.api.bank import CHAT, HELLO
from tests.api.conftest import running
from tests.redis_server import redis_server
from tests.support.wire import Script, fake_house

pytestmark = pytest.mark.redis

ACME, KEY = Holder("tenant", "acme"), Holder("key", "key_1")
PRINCIPAL = Principal("acme", key_id="key_1")


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Limits are counted here, and a store that is late on a busy machine is not one that fails."""
    monkeypatch.setattr("api.access.rate_limits.STORE_TIMEOUT_S", 60.0)


@pytest.fixture
async def url(redis_url):
    """The same server, emptied."""
    await said_to_redis(redis_url, "FLUSHALL")
    return redis_url


async def said_to_redis(url: str, *command: str) -> None:
    async with Redis.from_url(url) as client:
        await client.execute_command(*command)


@contextlib.asynccontextmanager
async def servers(url: str, count: int, **quota: int) -> AsyncIterator[list[WindowLimits]]:
    made = [open_limits(LimitSettings(tenant=Quota(**quota)), url) for _ in range(count)]
    try:
        yield made
    finally:
        for limits in made:
            await limits.close()


@contextlib.asynccontextmanager
async def places(url: str, lease_s: float = 30.0) -> AsyncIterator[Places]:
    if url == "memory":
        yield LocalPlaces()
        return
    pool = ConnectionPool.from_url(url)
    made = RedisPlaces(pool, lease_s=lease_s)
    try:
        yield made
    finally:
        await made.close()
        await pool.aclose()


@pytest.mark.parametrize("store", ["memory", "redis"])
async def test_a_place_is_taken_of_every_holder_or_of_none(url, store):
    async with places(url if store == "redis" else "memory") as kept:
        assert await kept.enter("a", {ACME: 2, KEY: 1}) is None
        assert KEY == await kept.enter("b", {ACME: 2, KEY: 1})
        assert await kept.enter("c", {ACME: 2}) is None
        assert ACME == await kept.enter("d", {ACME: 2})
        await kept.leave("a")
        assert await kept.enter("e", {ACME: 2, KEY: 1}) is None
        await kept.leave("unknown")


async def test_at_the_same_time_no_more_than_the_limit_come_in(url):
    async with servers(url, 4, requests=10, concurrency=50) as made:
        asked = [made[number % 4].admit(PRINCIPAL) for number in range(40)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, RateLimited)]
    assert 30 == len(refused), answers


async def test_tokens_used_on_one_server_count_on_the_other(url):
    async with servers(url, 2, miss_tokens=100) as (one, two):
        await (await one.admit(PRINCIPAL)).close(Usage(hit_device=10**6, miss=100))
        with pytest.raises(RateLimited, match="cache-miss tokens"):
            await two.admit(PRINCIPAL)


async def test_the_places_of_a_killed_server_come_back_with_its_leases(url):
    async with places(url, lease_s=0.3) as dead:
        assert await dead.enter("a", {ACME: 1}) is None
    async with places(url, lease_s=0.3) as alive:
        assert ACME == await alive.enter("b", {ACME: 1})
        await asyncio.sleep(0.4)
        assert await alive.enter("b", {ACME: 1}) is None
        await asyncio.sleep(0.9)
        assert ACME == await alive.enter("c", {ACME: 1}), "a running request lost its place"


async def test_a_redis_that_goes_away_lets_requests_in(tmp_path, caplog):
    quota = Quota(requests=2, concurrency=1)
    with redis_server(tmp_path) as url:
        limits = open_limits(LimitSettings(tenant=quota), url)
        first = await limits.admit(PRINCIPAL)
        assert "1" == first.headers["x-ratelimit-remaining-requests"]
        with pytest.raises(RateLimited, match="1 requests running"):
            await limits.admit(PRINCIPAL)
    assert [] == caplog.messages
    let_in = [await limits.admit(PRINCIPAL) for _ in range(3)]
    assert [{}, {}, {}] == [permit.headers for permit in let_in], "a limit was told, and not kept"
    for permit in (first, *let_in):
        await permit.close(Usage(miss=3))
    await limits.close()
    (line,) = caplog.messages
    assert "limits are off for 3.0 s" in line


async def test_a_redis_that_does_not_answer_is_waited_for_once(url, monkeypatch):
    """Nor does it hold up the requests of a server whose connections it took before."""
    monkeypatch.setattr("api.access.rate_limits.STORE_TIMEOUT_S", 0.5)
    async with servers(url, 1, requests=20, concurrency=20) as (limits,):
        await limits.admit(PRINCIPAL)
        await said_to_redis(url, "CLIENT", "PAUSE", "4000", "ALL")
        async with asyncio.timeout(3):  # each wait by itself is one of five seconds by default
            permits = [await limits.admit(PRINCIPAL) for _ in range(8)]
            for permit in permits:
                await permit.close(Usage(miss=3))
        assert [{}] * 8 == [permit.headers for permit in permits]
        await said_to_redis(url, "CLIENT", "UNPAUSE")


async def test_a_whole_request_under_shared_limits(url):
    """Concurrency over two servers, seen from the wire; the app closes its connections itself."""
    houses = [
        fake_house(limits=open_limits(LimitSettings(tenant=Quota(concurrency=2)), url))
        for _ in range(2)
    ]
    async with running(houses[0]) as (_, one), running(houses[1]) as (_, two):
        for house in houses:
            house.engine.script = Script(answer="abc", step_s=0.05)
        asked = [client.post(CHAT, json=HELLO) for client in (one, two, one, two)]
        answers = await asyncio.gather(*asked)
        assert [200, 200, 429, 429] == sorted(answer.status_code for answer in answers)
        assert 200 == (await two.post(CHAT, json=HELLO)).status_code
