"""Every route under /admin, as the application has them: none forgets to ask who comes."""

import re
from types import SimpleNamespace

import httpx
import pytest
from fastapi.routing import APIRoute

from api.admin.login.sessions import Admin, Role
from api.admin.router import admin_router
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


def walk(router):
    """The routes of a router, and of those that it includes."""
    for route in router.routes:
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
def parts(tmp_path):
    store = open_store(database_url(tmp_path))
    books = SimpleNamespace(accounts=Accounts(store), prover=Prover(store))
    yield fake_parts(books=books)
    store.close()


@pytest.fixture
async def app(parts):
    house = fake_house()
    app = create_app(house.wire, routers=(admin_router(parts),))
    async with app.router.lifespan_context(app):
        yield app
    house.close()


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


async def test_a_refused_request_does_not_break_the_page_of_requests():
    """It has no timings. With them, a refused client could take the page from the admins."""
    house = fake_house()
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
    house.close()
