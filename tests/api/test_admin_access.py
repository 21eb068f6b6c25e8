"""Who may come into `/admin`: cookies, keys, the operator's token, roles, CSRF."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from api.admin.access import Admin, MayChange, MayRead, Role
from api.admin.login.sessions import MAX_SESSIONS, Sessions
from api.admin.parts import AdminParts
from api.admin.router import admin_router
from api.app import create_app
from tests.support.admin import OPERATOR_TOKEN, fake_parts
from tests.support.wire import fake_house

pytestmark = pytest.mark.anyio

probe = APIRouter(prefix="/admin/probe")


@probe.get("")
async def look(found: MayRead) -> dict[str, str]:
    return {"name": found.name}


@probe.post("")
async def change(found: MayChange) -> dict[str, str]:
    return {"name": found.name}


@pytest.fixture
def parts() -> AdminParts:
    return fake_parts()


@contextlib.asynccontextmanager
async def admin_client(parts: AdminParts) -> AsyncIterator[httpx.AsyncClient]:
    house = fake_house()
    router = admin_router(parts)
    router.include_router(probe)
    app = create_app(house.wire, routers=(router,))
    try:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://test:8000"
            ) as client,
        ):
            yield client
    finally:
        house.close()


@pytest.fixture
async def client(parts: AdminParts) -> AsyncIterator[httpx.AsyncClient]:
    async with admin_client(parts) as client:
        yield client


def code_of(response: httpx.Response) -> tuple[int, str]:
    body: dict[str, Any] = response.json()
    return response.status_code, body["error"]["code"]


def log_in(parts: AdminParts, client: httpx.AsyncClient, role: Role = Role.ADMIN) -> str:
    """A session in the client's cookies; returns its CSRF token."""
    token, session = parts.sessions.open(Admin("ada", role))
    client.cookies.set("cachesvc_admin_8000", token)
    return session.csrf_token


@pytest.mark.parametrize("path", ["/admin/api/stats", "/admin/api/whoami", "/admin/probe"])
async def test_without_a_login_nothing_is_shown(client: httpx.AsyncClient, path: str) -> None:
    assert (401, "login_needed") == code_of(await client.get(path))


@pytest.mark.parametrize(
    ("bearer", "name"), [("sk-admin", "id-of-sk-admin"), (OPERATOR_TOKEN, "operator")]
)
async def test_a_bearer_may_look_and_change_without_a_csrf_token(
    client: httpx.AsyncClient, bearer: str, name: str
) -> None:
    headers = {"Authorization": f"Bearer {bearer}"}
    assert {"name": name} == (await client.get("/admin/probe", headers=headers)).json()
    assert {"name": name} == (await client.post("/admin/probe", headers=headers)).json()


async def test_the_operator_token_acts_for_whom_the_command_line_names(
    client: httpx.AsyncClient,
) -> None:
    headers = {"Authorization": f"Bearer {OPERATOR_TOKEN}", "X-Cachesvc-Actor": "cli:ada"}
    assert {"name": "cli:ada"} == (await client.get("/admin/probe", headers=headers)).json()
    headers["Authorization"] = "Bearer sk-admin"
    answer = await client.get("/admin/probe", headers=headers)
    assert {"name": "id-of-sk-admin"} == answer.json()


@pytest.mark.parametrize(
    ("bearer", "expected"),
    [("sk-plain", (403, "insufficient_scope")), ("sk-wrong", (401, "invalid_api_key"))],
)
async def test_other_keys_do_not_open_it(
    client: httpx.AsyncClient, bearer: str, expected: tuple[int, str]
) -> None:
    answer = await client.get("/admin/probe", headers={"Authorization": f"Bearer {bearer}"})
    assert expected == code_of(answer)


async def test_a_session_changes_things_only_with_its_csrf_token(
    parts: AdminParts, client: httpx.AsyncClient
) -> None:
    csrf_token = log_in(parts, client)
    assert {"name": "ada"} == (await client.get("/admin/probe")).json()
    assert (403, "csrf_failed") == code_of(await client.post("/admin/probe"))
    other = parts.sessions.open(Admin("eve"))[1].csrf_token
    wrong = await client.post("/admin/probe", headers={"X-CSRF-Token": other})
    assert (403, "csrf_failed") == code_of(wrong)
    by_header = await client.post("/admin/probe", headers={"X-CSRF-Token": csrf_token})
    by_form = await client.post("/admin/probe", data={"csrf_token": csrf_token})
    assert {"name": "ada"} == by_header.json() == by_form.json()


async def test_a_reader_looks_and_changes_nothing(
    parts: AdminParts, client: httpx.AsyncClient
) -> None:
    csrf_token = log_in(parts, client, Role.READER)
    assert {"name": "ada", "role": "reader"} == (await client.get("/admin/api/whoami")).json()
    answer = await client.post("/admin/probe", headers={"X-CSRF-Token": csrf_token})
    assert (403, "insufficient_scope") == code_of(answer)


@pytest.mark.parametrize(
    "path",
    [
        "/admin/api/history?window_s=inf&series=rate:a",
        "/admin/api/history?since_s=inf&series=rate:a",
        "/admin/requests?skip=99999999999999999999",
        "/admin/api/tenants/%00",
        "/admin/api/usage/session?session=a%00",
    ],
)
async def test_an_invalid_path_is_refused(
    parts: AdminParts, client: httpx.AsyncClient, path: str
) -> None:
    log_in(parts, client)
    assert (400, "invalid_value") == code_of(await client.get(path))


async def test_a_cookie_of_another_port_or_a_planted_one_gives_no_access(
    parts: AdminParts, client: httpx.AsyncClient
) -> None:
    token, _ = parts.sessions.open(Admin("ada"))
    client.cookies.set("cachesvc_admin_9000", token)
    client.cookies.set("cachesvc_admin_8000", "planted")
    assert (401, "login_needed") == code_of(await client.get("/admin/probe"))


async def test_history_asks_for_the_named_series(client: httpx.AsyncClient) -> None:
    headers = {"Authorization": "Bearer sk-admin"}
    query = {"series": ["rate:a", "p50:b"], "window_s": 60}
    answer = (await client.get("/admin/api/history", params=query, headers=headers)).json()
    assert ["rate:a", "p50:b"] == list(answer["series"])


def test_sessions_end_after_their_time_and_when_idle() -> None:
    now = [0.0]
    sessions = Sessions(lifetime_s=100, idle_s=30, clock_s=lambda: now[0])
    token, _ = sessions.open(Admin("ada"))
    for now[0] in (20.0, 45.0, 70.0, 99.0):
        assert sessions.find(token) is not None
    now[0] = 100.0
    assert sessions.find(token) is None
    idle, _ = sessions.open(Admin("ada"))
    now[0] = 130.0
    assert sessions.find(idle) is None
    assert 0 == len(sessions)


def test_sessions_are_bounded_and_end_by_name() -> None:
    sessions = Sessions()
    first, _ = sessions.open(Admin("ada"))
    for _ in range(MAX_SESSIONS):
        last, _ = sessions.open(Admin("eve"))
    assert MAX_SESSIONS == len(sessions)
    assert sessions.find(first) is None
    link, other = (sessions.make_link(Admin(name), ttl_s=60) for name in ("eve", "ada"))
    assert MAX_SESSIONS == sessions.close_all("eve")
    assert sessions.find(last) is None
    assert (None, Admin("ada")) == (sessions.use_link(link), sessions.use_link(other))


def test_a_link_logs_in_once_and_in_time() -> None:
    now = [0.0]
    sessions = Sessions(clock_s=lambda: now[0])
    link = sessions.make_link(Admin("ada"), ttl_s=60)
    late = sessions.make_link(Admin("ada"), ttl_s=60)
    assert Admin("ada") == sessions.use_link(link)
    assert sessions.use_link(link) is None
    now[0] = 60.0
    assert sessions.use_link(late) is None
