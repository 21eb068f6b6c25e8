"""Who may come into `/admin`: cookies, keys, links, the operator's token, roles, CSRF; and what
stands against abuse of them."""

import re
from typing import Any

import httpx
import pytest

from api.admin.login.guard import PER_ADDRESS, LoginLimits, network_of
from api.admin.login.sessions import MAX_SESSIONS, Admin, Role, Sessions
from api.errors import RateLimited
from tests.support.admin import OPERATOR_TOKEN, admin_client, error_of, fake_parts

COOKIE = "cachesvc_admin_8000"
ADA = "ada (id-of-sk-ada)"
OPERATOR = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}
PERSON = {"Accept": "text/html"}
LOOK, CHANGE = "/admin/api/whoami", "/admin/api/links"


@pytest.fixture
def parts():
    return fake_parts(stats=lambda: STATS)


@pytest.fixture
async def client(parts):
    async with admin_client(parts) as client:
        yield client


STATS: dict[str, Any] = {"engine": {"engines": ()}, "model": "m", "version": "1"}
STATS |= {"cache": {"tiers": {"device": {}}}, "traffic": {}}


def actions(parts):
    return parts.record.actions  # type: ignore[attr-defined]


async def proof_of(client):
    page = await client.get("/admin/login")
    found = re.search(r'name="proof" value="([0-9a-f]+)"', page.text)
    assert found, page.text
    return found[1]


async def log_in(client, key="sk-ada", **fields):
    proof = await proof_of(client)
    data = {"proof": proof, "key": key} | fields
    return await client.post("/admin/login", data=data, headers=PERSON)


async def csrf_of(client):
    page = await client.get("/admin", headers=PERSON)
    found = re.search(r'name="csrf_token" value="([^"]+)"', page.text)
    assert found, page.text
    return {"X-CSRF-Token": found[1]}


async def test_the_overview_tells_what_fires():
    firing = {"alert": "TierFaults", "severity": "ticket"}
    firing |= {"summary": "A tier faults: disk <checksum>"}
    firing |= {"runbook": "ops/runbooks/tier-faults.md"}
    headers = {**PERSON, "authorization": f"Bearer {OPERATOR_TOKEN}"}
    told = []

    async def fires():
        return told

    async with admin_client(fake_parts(stats=lambda: STATS, alerts=fires)) as client:
        quiet = await client.get("/admin", headers=headers)
        assert re.search(r"data-alerts [^>]*hidden>", quiet.text)
        told.append(firing)
        page = await client.get("/admin", headers=headers)
        assert not re.search(r"data-alerts [^>]*hidden>", page.text)
        assert "A tier faults: disk &lt;checksum&gt;" in page.text
        assert '<ul aria-live="polite">' in page.text  # a status has no list items
        assert [firing] == (await client.get("/admin/api/alerts", headers=headers)).json()


async def test_a_person_is_sent_to_the_login_page_and_back_to_what_was_chosen(parts, client):
    wanted = "/admin/requests?tenant=acme&page=2"
    sent = await client.get(wanted, headers=PERSON)
    assert (303, "/admin/login") == (sent.status_code, httpx.URL(sent.headers["location"]).path)
    assert wanted == httpx.URL(sent.headers["location"]).params["next"]
    answer = await log_in(client, next=wanted)
    assert (303, wanted) == (answer.status_code, answer.headers["location"])
    assert [("admin.login", ADA)] == actions(parts)
    client.cookies.clear()
    part = {"hx-request": "true", "hx-current-url": f"http://t{wanted}"}
    moved = await client.get("/admin/api/stats", headers={"HX-Request": "true"})
    assert (401, "/admin/login?next=/admin") == (moved.status_code, moved.headers["hx-redirect"])
    refused = await client.get("/admin/requests", headers=part)
    assert 401 == refused.status_code
    assert wanted == httpx.URL(refused.headers["hx-redirect"]).params["next"]


@pytest.mark.parametrize(
    "target", ["https://evil.example/", "//evil.example", "/v1/models", "/adminx", "/admin?x=//e"]
)
async def test_a_login_leads_to_our_own_pages_only(client, target):
    assert "/admin" == (await log_in(client, next=target)).headers["location"]


@pytest.mark.parametrize(
    ("url", "name", "expected"),
    [
        ("http://test:8000", COOKIE, {"path=/admin"}),
        ("https://test:8443", "__Host-cachesvc_admin_8443", {"path=/", "secure"}),
    ],
)
async def test_the_cookie_is_for_the_browser_and_this_server_alone(client, url, name, expected):
    client.base_url = httpx.URL(url)
    answer = await log_in(client)
    cookie = next(c for c in answer.headers.get_list("set-cookie") if c.startswith(f"{name}="))
    flags = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict", "max-age=43200"} | expected == flags
    assert 43 == len(cookie.split(";")[0].removeprefix(f"{name}="))
    assert 200 == (await client.get("/admin", headers=PERSON)).status_code


@pytest.mark.parametrize("key", ["guessed", "sk-wrong", "sk-plain"])
async def test_every_failed_login_gets_the_same_message(parts, client, key):
    answer = await log_in(client, key)
    assert 401 == answer.status_code
    assert "no key that opens the dashboard" in answer.text
    assert key not in answer.text
    assert COOKIE not in client.cookies
    assert ["admin.login_failed"] == [action for action, _ in actions(parts)]


async def test_the_login_page_mentions_a_lost_session(client):
    assert "has ended" not in (await client.get("/admin/login")).text
    assert 303 == (await log_in(client)).status_code
    async with admin_client(fake_parts(stats=lambda: STATS)) as restarted:
        restarted.cookies = client.cookies
        lost = await restarted.get("/admin", headers=PERSON, follow_redirects=True)
        assert "its key was revoked, or the server was restarted. Log in." in lost.text
        assert 303 == (await log_in(restarted)).status_code
        assert 200 == (await restarted.get("/admin", headers=PERSON)).status_code


async def test_a_login_by_key_ends_with_the_key(parts, client):
    assert 303 == (await log_in(client, "sk-admin")).status_code
    assert [("admin.login", "id-of-sk-admin")] == actions(parts)
    assert 200 == (await client.get("/admin/api/whoami")).status_code
    parts.keys.revoked.add("id-of-sk-admin")  # type: ignore[attr-defined]
    assert (401, "login_needed") == error_of(await client.get("/admin/api/whoami"))
    assert 0 == len(parts.sessions)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_attempts_are_counted_by_client_network(address, network):
    assert network == network_of(address)


async def test_all_addresses_of_an_ipv6_network_guess_as_one():
    """From six of them, all attempts of the server could be used up each minute."""
    limits = LoginLimits(per_address=2)
    for address in ("2001:db8::0", "2001:db8::1"):
        await limits.attempt(address)
    with pytest.raises(RateLimited):
        await limits.attempt("2001:db8::3")
    await limits.attempt("2001:db8:0:1::3")


async def test_guessing_is_stopped_before_the_key_is_looked_at(parts, client):
    for _ in range(PER_ADDRESS):
        assert 401 == (await log_in(client, "sk-wrong")).status_code
    right = await log_in(client)
    assert (429, "60") == (right.status_code, right.headers["retry-after"])
    assert "wait a minute" in right.text
    assert COOKIE not in client.cookies
    assert PER_ADDRESS == len(actions(parts))


async def test_a_cross_site_form_does_not_log_in(client):
    proof = await proof_of(client)
    data = {"key": "sk-ada"}
    for cookies, forged in (({}, proof), (dict(client.cookies), "0" * 64), ({}, "")):
        client.cookies.clear()
        client.cookies.update(cookies)
        answer = await client.post("/admin/login", data=data | {"proof": forged})
        assert (403, "csrf_failed") == error_of(answer)


async def test_sessions_end_on_the_server(parts, client):
    """At the next login, one that was planted too; and at a logout."""
    client.cookies.set(COOKIE, "planted", domain="test.local", path="/admin")
    for _ in range(2):
        await log_in(client)
        assert parts.sessions.find("planted") is None
        assert 1 == len(parts.sessions)
    token = client.cookies[COOKIE]
    assert (403, "csrf_failed") == error_of(await client.post("/admin/logout"))
    answer = await client.post("/admin/logout", headers=await csrf_of(client))
    assert (303, "/admin/login") == (answer.status_code, answer.headers["location"])
    client.cookies.set(COOKIE, token)
    assert (401, "login_needed") == error_of(await client.get("/admin/api/stats"))
    assert [("admin.login", ADA)] * 2 + [("admin.logout", ADA)] == actions(parts)


async def test_a_reader_by_key_looks_and_cannot_change(parts, client):
    assert 303 == (await log_in(client, "sk-read")).status_code
    bearer = {"Authorization": "Bearer sk-read"}
    for headers in ({}, bearer):
        told = (await client.get("/admin/api/whoami", headers=headers)).json()
        assert {"name": "ada (id-of-sk-read)", "role": "reader"} == told
    for headers in (await csrf_of(client), bearer):
        refused = await client.post("/admin/api/links", headers=headers)
        assert (403, "insufficient_scope") == error_of(refused)


async def test_a_login_link_works_once(parts, client):
    made = await client.post("/admin/api/links?role=reader", headers=OPERATOR)
    path = made.json()["path"]
    assert "Open the dashboard" in (await client.get(path)).text
    assert {"name": "operator", "role": "reader"} == (await client.get("/admin/api/whoami")).json()
    client.cookies.clear()
    assert "was used or is too old" in (await client.get(path)).text
    assert COOKIE not in client.cookies
    assert ["admin.link", "admin.login"] == [action for action, _ in actions(parts)]


async def test_a_login_by_a_link_that_a_key_made_ends_with_the_key(parts, client):
    """Before a key is revoked, its holder makes a login link, and from that login the next link."""
    made = await client.post("/admin/api/links", headers={"Authorization": "Bearer sk-admin"})
    await client.get(made.json()["path"])
    made = await client.post("/admin/api/links", headers=await csrf_of(client))
    await client.get(made.json()["path"])
    kept = (await client.post("/admin/api/links", headers=await csrf_of(client))).json()["path"]
    assert 200 == (await client.get("/admin/api/whoami")).status_code
    parts.keys.revoked.add("id-of-sk-admin")  # type: ignore[attr-defined]
    assert (401, "login_needed") == error_of(await client.get("/admin/api/whoami"))
    await client.get(kept)
    assert (401, "login_needed") == error_of(await client.get("/admin/api/whoami"))


async def test_assets_are_kept_by_digest_and_compressed(client):
    packed = await client.get("/admin/static/uplot.js")
    assert "gzip" == packed.headers["content-encoding"]
    plain = await client.get("/admin/static/uplot.js", headers={"Accept-Encoding": "identity"})
    assert packed.content == plain.content
    assert 404 == (await client.get("/admin/static/..%2frouter.py")).status_code


def in_session(parts, client, role=Role.ADMIN):
    """A session in the client's cookies; returns its CSRF token."""
    token, session = parts.sessions.open(Admin("ada", role))
    client.cookies.set(COOKIE, token)
    return session.csrf_token


async def test_without_a_login_nothing_is_shown(parts, client):
    for path in ("/admin/api/stats", LOOK):
        assert (401, "login_needed") == error_of(await client.get(path))
    token, _ = parts.sessions.open(Admin("ada"))
    client.cookies.set("cachesvc_admin_9000", token)  # another port's
    client.cookies.set(COOKIE, "planted")
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
    csrf_token = in_session(parts, client)
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
    in_session(parts, client)
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
