"""Who may come into `/admin`: cookies, keys, the operator's token, roles, CSRF."""

import pytest

from api.admin.login.sessions import MAX_SESSIONS, Admin, Role, Sessions
from tests.support.admin import OPERATOR_TOKEN, admin_client, error_of, fake_parts

LOOK, CHANGE = "/admin/api/whoami", "/admin/api/links"


@pytest.fixture
def parts():
    return fake_parts()


@pytest.fixture
async def client(parts):
    async with admin_client(parts) as client:
        yield client


def log_in(parts, client, role=Role.ADMIN):
    """A session in the client's cookies; returns its CSRF token."""
    token, session = parts.sessions.open(Admin("ada", role))
    client.cookies.set("cachesvc_admin_8000", token)
    return session.csrf_token


async def test_without_a_login_nothing_is_shown(parts, client):
    for path in ("/admin/api/stats", LOOK):
        assert (401, "login_needed") == error_of(await client.get(path))
    token, _ = parts.sessions.open(Admin("ada"))
    client.cookies.set("cachesvc_admin_9000", token)  # another port's
    client.cookies.set("cachesvc_admin_8000", "planted")
    assert (401, "login_needed") == error_of(await client.get(LOOK))


@pytest.mark.parametrize(
    ("bearer", "actor", "name"),
    [
        ("sk-admin", "", "id-of-sk-admin"),
        ("sk-admin", "cli:ada", "id-of-sk-admin"),
        (OPERATOR_TOKEN, "", "operator"),
        (OPERATOR_TOKEN, "cli:ada", "cli:ada"),  # whom the command line names
    ],
)
async def test_a_bearer_may_look_and_change_without_a_csrf_token(
    parts, client, bearer, actor, name
):
    headers = {"Authorization": f"Bearer {bearer}", "X-Cachesvc-Actor": actor}
    told = (await client.get(LOOK, headers=headers)).json()
    assert {"name": name, "role": "admin"} == told
    assert 200 == (await client.post(CHANGE, headers=headers)).status_code
    assert [("admin.link", name)] == parts.record.actions  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("bearer", "expected"),
    [("sk-plain", (403, "insufficient_scope")), ("sk-wrong", (401, "invalid_api_key"))],
)
async def test_other_keys_do_not_open_it(client, bearer, expected):
    answer = await client.get(LOOK, headers={"Authorization": f"Bearer {bearer}"})
    assert expected == error_of(answer)


async def test_a_session_changes_things_only_with_its_csrf_token(parts, client):
    csrf_token = log_in(parts, client)
    assert {"name": "ada", "role": "admin"} == (await client.get(LOOK)).json()
    assert (403, "csrf_failed") == error_of(await client.post(CHANGE))
    other = parts.sessions.open(Admin("eve"))[1].csrf_token
    wrong = await client.post(CHANGE, headers={"X-CSRF-Token": other})
    assert (403, "csrf_failed") == error_of(wrong)
    by_header = await client.post(CHANGE, headers={"X-CSRF-Token": csrf_token})
    by_form = await client.post(CHANGE, data={"csrf_token": csrf_token})
    tenant = {"tenant": "new", "why": "x"}
    for token in ("", other):  # a form that a JSON route takes
        forged = await client.post("/admin/api/tenants", data=tenant | {"csrf_token": token})
        assert (403, "csrf_failed") == error_of(forged)
    assert 200 == by_header.status_code == by_form.status_code


@pytest.mark.parametrize(
    "path",
    [
        "/admin/api/history?window_s=inf&series=rate:a",
        "/admin/api/history?window_s=-1",
        "/admin/api/history?since_s=inf&series=rate:a",
        "/admin/requests?skip=99999999999999999999",
        "/admin/api/tenants/%00",
        "/admin/api/usage/session?session=a%00",
    ],
)
async def test_an_invalid_path_is_refused(parts, client, path):
    log_in(parts, client)
    answer = await client.get(path)
    assert (400, "invalid_value") == error_of(answer)
    if "=" in path:
        name = path.partition("?")[2].partition("=")[0]
        assert "%00" in path or name in answer.json()["error"]["message"]


async def test_history_asks_for_the_named_series(client):
    headers = {"Authorization": "Bearer sk-admin"}
    query = {"series": ["rate:a", "p50:b"], "window_s": 60}
    answer = (await client.get("/admin/api/history", params=query, headers=headers)).json()
    assert ["rate:a", "p50:b"] == list(answer["series"])


def test_sessions_and_links_end_after_their_time_and_when_idle():
    now = [0.0]
    sessions = Sessions(lifetime_s=100, idle_s=30, clock_s=lambda: now[0])
    token, _ = sessions.open(Admin("ada"))
    for now[0] in (20.0, 45.0, 70.0, 99.0):
        assert sessions.find(token) is not None
    now[0] = 100.0
    assert sessions.find(token) is None
    idle, _ = sessions.open(Admin("ada"))
    link, late = (sessions.make_link(Admin("ada"), ttl_s=30) for _ in range(2))
    assert [Admin("ada"), None] == [sessions.use_link(link) for _ in range(2)]
    now[0] = 130.0
    assert sessions.find(idle) is None and sessions.use_link(late) is None
    assert 0 == len(sessions)


def test_sessions_are_bounded():
    sessions = Sessions()
    first, _ = sessions.open(Admin("ada"))
    for _ in range(MAX_SESSIONS):
        last, _ = sessions.open(Admin("eve"))
    assert MAX_SESSIONS == len(sessions)
    assert sessions.find(first) is None and sessions.find(last) is not None
