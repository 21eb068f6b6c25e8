"""A server that needs no keys answers programs of its machine, and no page of the web."""

import pytest

from api.collaborators import WireSettings
from billing.keys import Principal
from tests.api.conftest import running
from tests.support.admin import error_of
from tests.support.wire import OpenGate, fake_house

HELLO = {"model": "bytes", "prompt": "hi", "max_tokens": 1}
ROUTES = dict.fromkeys(("/v1/completions", "/tokenize"), "POST")
ROUTES |= dict.fromkeys(("/v1/models", "/user/balance", "/v1/cache/events"), "GET")
ROUTES |= {"/v1/cache/requests/x": "GET"}
# The first host's name is one that has been pointed at 127.0.0.1.
HOSTS = ("evil.example", "localhost.evil.example:8000", "[::1", "")
ORIGINS = ("https://evil.example", "http://localhost.evil.example", "http://192.168.1.7", "null")
FOREIGN = [("Host", each) for each in HOSTS] + [("Origin", each) for each in ORIGINS]


@pytest.mark.parametrize(("name", "value"), FOREIGN)
async def test_a_page_from_elsewhere_is_refused(house, client, name, value):
    for path, method in ROUTES.items():
        answer = await client.request(method, path, headers={name: value})
        assert (403, "foreign_page") == error_of(answer), path
    assert [] == house.engine.requests


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:8000"},
        {"Host": "[::1]:8000", "Origin": "http://[::1]:3000"},
        {"Host": "10.0.0.5"},  # a port that is forwarded
        {"Host": "app.localhost", "Origin": "https://app.localhost:8443"},
        {"Origin": "vscode-webview://x"},  # a program's, which no page can claim
    ],
)
async def test_a_local_client_is_answered(client, headers):
    assert 200 == (await client.post("/v1/completions", json=HELLO, headers=headers)).status_code


APP, EVIL = "https://app.example", "https://evil.example"
KEYED, OPEN = OpenGate(Principal("acme", key_id="key_1")), OpenGate()
ALLOWED = "access-control-allow-origin"


@pytest.mark.parametrize(
    ("origins", "gate", "origin", "path", "expected"),  # statuses of preflight and request; origin
    [
        ([], KEYED, APP, "/v1/models", (405, 200, None)),
        ([], OPEN, APP, "/v1/models", (405, 403, None)),
        ([APP], KEYED, APP, "/v1/models", (200, 200, APP)),
        ([APP], OPEN, APP, "/v1/models", (200, 200, APP)),
        ([APP], KEYED, EVIL, "/v1/models", (400, 200, None)),
        ([APP], OPEN, EVIL, "/v1/models", (400, 403, None)),
        ([APP], OPEN, "null", "/v1/models", (400, 403, None)),
        (["*"], KEYED, EVIL, "/v1/models", (200, 200, "*")),
        (["*"], OPEN, EVIL, "/v1/models", (200, 403, "*")),  # it may read why
        ([APP], OPEN, APP, "/v1/nothing", (200, 404, APP)),
        (["*"], KEYED, APP, "/metrics", (405, 200, None)),
        (["*"], KEYED, APP, "/admin/api/x", (404, 404, None)),
    ],
)
async def test_pages_of_the_configured_origins_may_read(origins, gate, origin, path, expected):
    house = fake_house(gatekeeper=gate, settings=WireSettings(cors_origins=origins))
    asks = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-api-key"}
    async with running(house) as (_, client):
        before = await client.options(path, headers={"Origin": origin, **asks})
        after = await client.get(path, headers={"Origin": origin})
    assert expected == (before.status_code, after.status_code, after.headers.get(ALLOWED))
    assert expected[2] == before.headers.get(ALLOWED)
    assert "access-control-allow-credentials" not in {*before.headers, *after.headers}


async def test_no_page_of_scripts_from_elsewhere_is_served(client):
    codes = [(await client.get(path)).status_code for path in ("/docs", "/redoc", "/openapi.json")]
    assert [404, 404, 200] == codes
