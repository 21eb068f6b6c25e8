"""The stream of block events as a client reads it: who sees what, what is replayed, how it ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI

from api.access.auth import Salts
from api.admin.router import admin_router
from api.app import create_app
from api.cache.feeds import MAX_FEEDS
from api.collaborators import WireSettings
from billing.errors import UnknownKey
from billing.keys import Principal, Scope
from tests.api.driver import Visit
from tests.support.admin import OPERATOR_TOKEN, fake_parts
from tests.support.wire import FakeHouse, fake_house
from tiers.blocks.keys import PrefixKey, token_bytes
from tiers.telemetry.events import EventKind
from tiers.tier import Cause, TierName

pytestmark = pytest.mark.anyio

SALTS = Salts(b"secret of the tests", {"public": frozenset({"acme"})})
PRINCIPALS = {
    "Bearer sk-admin": Principal("ops", scopes=frozenset({Scope.INFERENCE, Scope.ADMIN})),
    "Bearer sk-acme": Principal("acme", scopes=frozenset({Scope.INFERENCE})),
}


class Keys:
    """A gate that knows two keys."""

    async def identify(self, authorization: str | None) -> Principal:
        if authorization not in PRINCIPALS:
            raise UnknownKey("no such API key")
        return PRINCIPALS[authorization]


@pytest.fixture
async def house() -> AsyncIterator[FakeHouse]:
    house = fake_house(gatekeeper=Keys(), salts=SALTS, settings=WireSettings(keepalive_s=0.05))
    yield house
    house.close()


@pytest.fixture
async def app(house: FakeHouse) -> AsyncIterator[FastAPI]:
    app = create_app(house.wire, routers=(admin_router(fake_parts()),))
    async with app.router.lifespan_context(app):
        yield app


PUBLIC, ADMIN = "/v1/cache/events", "/admin/api/events"


class Listener(Visit):
    """A client of the stream."""

    def __init__(
        self, app: FastAPI, key: str, query: str = "", *, path: str = PUBLIC, **headers: str
    ) -> None:
        super().__init__(app, path, {}, authorization=f"Bearer {key}", **headers)
        self._scope |= {"method": "GET", "query_string": query.encode()}

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        told = []
        for block in self.text.split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n") if line[:1] not in ":")
            if "event" in lines:
                told.append((lines["event"], json.loads(lines["data"])))
        return told

    async def until(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        async with asyncio.timeout(30):
            while len(self.events()) < count:
                self.arrived.clear()
                await self.arrived.wait()
        return self.events()

    async def opened(self) -> "Listener":
        self.start()
        await self.first_text()
        return self

    async def gone(self) -> None:
        self.leave()
        async with asyncio.timeout(30):
            await self.task


def root_of(house: FakeHouse, tenant: str, share: str | None = None) -> PrefixKey:
    model = next(iter(house.wire.inference.models.values()))
    return SALTS.scoped(model.scope, tenant, share).root()


def publish(house: FakeHouse, scope: PrefixKey, kind: EventKind = EventKind.STORED) -> None:
    house.wire.cache.feeds.stream.publish(
        kind,
        TierName.DEVICE,
        key=PrefixKey(b"k" * 16),
        parent=scope,
        scope=scope,
        tokens=token_bytes([7, 8, 9]),
        nbytes=123,
        cause=Cause.ROOM if kind is EventKind.REMOVED else None,
    )


@pytest.mark.parametrize(("key", "path"), [("sk-admin", PUBLIC), (OPERATOR_TOKEN, ADMIN)])
async def test_an_admin_sees_every_tenants_blocks(
    house: FakeHouse, app: FastAPI, key: str, path: str
) -> None:
    listener = await Listener(app, key, path=path).opened()
    scope = root_of(house, "other")
    publish(house, scope)
    kind, told = (await listener.until(1))[0]
    expected = {
        "kind": "stored",
        "tier": "device",
        "key": "6b" * 16,
        "parent": scope.hex(),
        "scope": scope.hex(),
        "num_tokens": 3,
        "bytes": 123,
        "source": None,
        "cause": None,
    }
    assert "stored" == kind and {"number", "time_s", *expected} == told.keys()
    assert expected == {name: told[name] for name in expected}
    await listener.gone()


async def test_any_other_key_sees_its_own_tenants_and_groups_blocks_alone(
    house: FakeHouse, app: FastAPI
) -> None:
    listener = await Listener(app, "sk-acme", "tokens=1").opened()
    publish(house, root_of(house, "other"))
    publish(house, root_of(house, "acme"))
    publish(house, root_of(house, "acme", "public"))
    told = [event["scope"] for _, event in await listener.until(2)]
    assert [root_of(house, "acme").hex(), root_of(house, "acme", "public").hex()] == told
    assert [7, 8, 9] == listener.events()[0][1]["token_ids"]
    await listener.gone()


async def test_tiers_and_kinds_can_be_chosen(house: FakeHouse, app: FastAPI) -> None:
    query = "tier=device&tier=disk&kind=removed"
    listener = await Listener(app, "sk-admin", query).opened()
    publish(house, root_of(house, "a"))
    publish(house, root_of(house, "a"), EventKind.REMOVED)
    kind, told = (await listener.until(1))[0]
    assert ("removed", "room") == (kind, told["cause"])
    await listener.gone()


async def test_a_listener_returning_with_its_last_id_misses_nothing(
    house: FakeHouse, app: FastAPI
) -> None:
    first = await Listener(app, "sk-admin").opened()
    publish(house, root_of(house, "a"))
    last = (await first.until(1))[0][1]["number"]
    await first.gone()
    publish(house, root_of(house, "a"))
    again = Listener(app, "sk-admin", **{"last-event-id": str(last)})
    await again.opened()
    assert [("stored", last + 1)] == [(kind, e["number"]) for kind, e in await again.until(1)]
    await again.gone()
    late = Listener(app, "sk-admin", f"after={last - 50}")
    await late.opened()
    assert ("gap", {"missed": None}) == (await late.until(1))[0]
    await late.gone()


async def test_a_slow_client_learns_how_much_it_missed(house: FakeHouse, app: FastAPI) -> None:
    listener = await Listener(app, "sk-admin").opened()
    for _ in range(20_000):
        publish(house, root_of(house, "a"))
    events = await listener.until(16_385)
    assert ("gap", {"missed": 20_000 - 16_384}) == events[0]
    await listener.gone()


async def test_a_stop_ends_the_streams_and_refuses_new_ones(house: FakeHouse, app: FastAPI) -> None:
    listener = await Listener(app, "sk-admin").opened()
    house.wire.cache.feeds.close()
    async with asyncio.timeout(30):
        await listener.task
    assert "event: closing" in listener.text
    late = Listener(app, "sk-admin").start()
    await late.task
    assert 503 == late.messages[0]["status"]
    late.leave()


async def test_the_number_of_listeners_is_bounded(house: FakeHouse, app: FastAPI) -> None:
    """One tenant's connections leave places for another's, and for the operator's."""
    listeners, refused = [], 0
    for _ in range(MAX_FEEDS + 5):
        listener = Listener(app, "sk-admin").start()
        await listener.first_text()
        if listener.messages[0]["status"] == 200:
            listeners.append(listener)
        else:
            refused += 1
            assert 503 == listener.messages[0]["status"]
            assert f"{MAX_FEEDS * 3 // 4} of them of this tenant" in listener.text
    assert 5 + MAX_FEEDS // 4 == refused
    listeners.append(await Listener(app, "sk-acme").opened())
    listeners.append(await Listener(app, OPERATOR_TOKEN, path=ADMIN).opened())
    for listener in listeners:
        await listener.gone()
    again = await Listener(app, "sk-admin").opened()
    assert 200 == again.messages[0]["status"], "those who left gave their places back"
    await again.gone()


async def test_silence_is_filled_and_a_client_that_goes_or_stops_reading_leaves_nothing() -> None:
    settings = WireSettings(keepalive_s=0.02, write_timeout_s=0.05)
    house = fake_house(gatekeeper=Keys(), salts=SALTS, settings=settings)
    app = create_app(house.wire)
    async with app.router.lifespan_context(app), asyncio.timeout(30):
        listener = await Listener(app, "sk-admin").opened()
        while listener.text.count(": keep-alive") < 2:
            listener.arrived.clear()
            await listener.arrived.wait()
        await listener.gone()
        assert 0 == house.wire.cache.feeds.stream.num_subscribers
        listener = await Listener(app, "sk-acme").opened()
        listener.stuck = True
        await listener.task
        assert 0 == house.wire.cache.feeds.stream.num_subscribers
    house.close()


@pytest.mark.parametrize(
    ("key", "path", "query", "status", "words"),
    [
        ("sk-none", PUBLIC, "", 401, "no such API key"),
        ("sk-acme", PUBLIC, "tier=tape", 400, "known: device, host, disk, remote"),
        ("sk-acme", PUBLIC, "after=yesterday", 400, "is not an event's id"),
        ("sk-plain", ADMIN, "", 403, "lacks the scope 'admin'"),
    ],
)
async def test_an_unsupported_request_is_explained(
    app: FastAPI, key: str, path: str, query: str, status: int, words: str
) -> None:
    listener = Listener(app, key, query, path=path).start()
    await listener.task
    assert status == listener.messages[0]["status"]
    assert words in listener.text
