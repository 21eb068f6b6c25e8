"""Every route under /admin, as the application has them: none forgets to ask who comes. They are
made when somebody asks for them, and then are there as ever."""

import asyncio
import re
from types import SimpleNamespace

import httpx
import pytest
from fastapi.routing import APIRoute

from api.admin import router
from api.admin.login.sessions import Admin, Role
from api.admin.routes.operation_table import REMOVED
from api.app import create_app
from api.page_headers import POLICY
from billing.accounts import Accounts
from billing.proof.prover import Prover
from billing.store.opening import database_url, open_store
from engine.errors import QueueFull
from tests.support.admin import admin_client, fake_parts
from tests.support.wire import Script, fake_house

COOKIE = "cachesvc_admin_8000"
OPEN = {"/admin/login", "/admin/static/{name}"}  # to anybody: how else would they come in
OF_READERS = {  # they ask by POST, for their body or what they cost, and change nothing
    "/admin/logout",
    "/admin/money/verify",
    "/admin/api/prices/show",
    "/admin/api/prices/lint",
    "/admin/api/prices/plan",
    "/admin/api/ledger/verify",
    *(f"/admin/api/{gone}{rest}" for gone in REMOVED for rest in ("", "/{rest:path}")),
}


def walk(owner):
    """The routes of a router, and of those that it includes."""
    for route in owner.routes:
        if isinstance(route, APIRoute):
            yield route
        elif hasattr(route, "original_router"):
            yield from walk(route.original_router)


def routes(app):
    """Method and path of each."""
    for route in walk(app):
        if route.path.startswith("/admin"):
            yield from ((method, route.path) for method in sorted(route.methods))


@pytest.fixture
def house():
    house = fake_house()
    yield house
    house.close()


@pytest.fixture
def parts(tmp_path):
    store = open_store(database_url(tmp_path))
    books = SimpleNamespace(accounts=Accounts(store), prover=Prover(store))
    yield fake_parts(books=books)
    store.close()


@pytest.fixture
async def app(parts, house):
    app = create_app(house.wire, routers=(router.admin_router(parts),))
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def client(app):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test:8000") as client:
        yield client


async def code_of(client, method, path, headers=None):
    url = re.sub(r"{[^}]*}", "1", path)
    answer = await client.request(method, url, json={}, headers=headers)
    assert POLICY == answer.headers["content-security-policy"], path
    assert "DENY" == answer.headers["x-frame-options"], path
    assert "nosniff" == answer.headers["x-content-type-options"], path
    kept = "immutable" in answer.headers["cache-control"]
    assert kept == (path == "/admin/static/app.js"), path
    assert kept or "no-store" in answer.headers["cache-control"] or path in OPEN, path
    error = answer.json().get("error") if "json" in answer.headers.get("content-type", "") else {}
    return str(error["code"]) if error else ""


async def test_nothing_is_open_but_the_way_in(app, client):
    found = {(m, path): await code_of(client, m, path) for m, path in routes(app)}
    assert 60 < len(found), "the walk finds the routes"
    assert "not_found" == await code_of(client, "GET", "/admin/nothing")
    assert "" == await code_of(client, "GET", "/admin/static/app.js")
    assert "unsafe" not in POLICY
    assert OPEN == {path for (_, path), code in found.items() if code != "login_needed"}


async def test_every_change_asks_for_the_csrf_token(app, client, parts):
    token, _ = parts.sessions.open(Admin("ada"))
    client.cookies.set(COOKIE, token)
    found = {path: await code_of(client, m, path) for m, path in routes(app) if m != "GET"}
    assert OPEN & set(found) == {path for path, code in found.items() if code != "csrf_failed"}


async def test_every_change_asks_for_an_admin(app, client, parts):
    token, session = parts.sessions.open(Admin("bob", Role.READER))
    client.cookies.set(COOKIE, token)
    headers = {"X-CSRF-Token": session.csrf_token}
    changing = [path for method, path in routes(app) if method != "GET" and path not in OPEN]
    refused = {
        path
        for path in sorted(changing, key="/admin/logout".__eq__)  # which ends the session, last
        if await code_of(client, "POST", path, headers) == "insufficient_scope"
    }
    assert OF_READERS == set(changing) - refused


async def test_a_refused_request_does_not_break_the_page_of_requests(house):
    """It has no timings. With them, a refused client could take the page from the admins."""
    house.engine.script = Script(refuse=QueueFull("as many wait as may"))
    parts = fake_parts(journal=house.wire.records.journal)
    async with admin_client(parts, house, authorization="Bearer sk-admin") as client:
        body = {"model": "bytes", "prompt": "hi", "max_tokens": 1}
        local = {"host": "localhost"}
        answer = await client.post("/v1/completions", json=body, headers=local)
        assert 503 == answer.status_code
        for path in ("/admin/requests", "/admin/requests?state=refused"):
            answer = await client.get(path)
            assert 200 == answer.status_code and "overloaded" in answer.text
        [refused] = list(house.wire.records.journal.newest())
        one = await client.get(f"/admin/requests/{refused.request_id}")
        assert 200 == one.status_code


@pytest.fixture
async def late(house):
    """A client of an application that has made none of them yet."""
    async with admin_client(fake_parts(), house, host="localhost") as client:
        yield client


async def test_they_are_made_once_by_the_first_requests_for_them_alone(late, monkeypatch):
    made, make = [], router.admin_router

    def counted(parts):
        made.append(parts)
        return make(parts)

    monkeypatch.setattr(router, "admin_router", counted)
    codes = [(await late.get(path)).status_code for path in ("/health", "/adminx", "/v1/models")]
    assert ([200, 404, 200], 0) == (codes, len(made))
    paths = ["/admin", "/admin/api/tenants", "/admin/nowhere", "/admin"]
    answers = await asyncio.gather(*map(late.get, paths))
    assert [401, 401, 404, 401] == [each.status_code for each in answers]
    assert 200 == (await late.get("/admin/login")).status_code
    assert 1 == len(made)


async def test_the_document_of_all_routes_has_them(late, house):
    document = (await late.get("/openapi.json")).json()
    eager = create_app(house.wire, routers=(router.admin_router(fake_parts()),))
    assert eager.openapi() == document
    assert "/admin/api/tenants" in document["paths"]


async def test_they_are_tried_again_after_a_failure(late, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(router, "admin_router", lambda parts: 1 / 0)
        assert 500 == (await late.get("/admin/login")).status_code
        assert 200 == (await late.get("/health")).status_code
    assert 200 == (await late.get("/admin/login")).status_code
