"""The admin routes are made when somebody asks for them, and then are there as ever."""

import asyncio

import pytest

from api.admin import router
from api.app import create_app
from tests.support.admin import admin_client, fake_parts
from tests.support.wire import fake_house


@pytest.fixture
def house():
    house = fake_house()
    yield house
    house.close()


@pytest.fixture
async def client(house):
    async with admin_client(fake_parts(), house, host="localhost") as client:
        yield client


async def test_they_are_made_once_by_the_first_requests_for_them_alone(client, monkeypatch):
    made, make = [], router.admin_router

    def counted(parts):
        made.append(parts)
        return make(parts)

    monkeypatch.setattr(router, "admin_router", counted)
    codes = [(await client.get(path)).status_code for path in ("/health", "/adminx", "/v1/models")]
    assert ([200, 404, 200], 0) == (codes, len(made))
    paths = ["/admin", "/admin/api/tenants", "/admin/nowhere", "/admin"]
    answers = await asyncio.gather(*map(client.get, paths))
    assert [401, 401, 404, 401] == [each.status_code for each in answers]
    assert 200 == (await client.get("/admin/login")).status_code
    assert 1 == len(made)


async def test_the_document_of_all_routes_has_them(client, house):
    document = (await client.get("/openapi.json")).json()
    eager = create_app(house.wire, routers=(router.admin_router(fake_parts()),))
    assert eager.openapi() == document
    assert "/admin/api/tenants" in document["paths"]


async def test_they_are_tried_again_after_a_failure(client, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(router, "admin_router", lambda parts: 1 / 0)
        assert 500 == (await client.get("/admin/login")).status_code
        assert 200 == (await client.get("/health")).status_code
    assert 200 == (await client.get("/admin/login")).status_code
