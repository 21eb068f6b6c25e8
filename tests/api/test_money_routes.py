"""/admin/api over a real ledger: what each route says and changes, and that the command line
says the same.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from typer.testing import CliRunner

from api.admin.routes import derived
from api.admin.routes import ledger as ledger_routes
from billing.money import UNITS
from billing.operations.books import OpenBooks
from billing.prices.cards import shipped_cards
from billing.proof import audit
from billing.reports.receipts import ReceiptSigner, verify_receipt
from billing.store.opening import database_url
from billing.usage import Usage
from cachesvc.cli import app as command_line
from tests.support.admin import OPERATOR_TOKEN, admin_client, fake_parts
from tests.support.billing import ManualClock, TestLedger, books_of, running_ledger

USAGE = Usage(hit_disk=900, miss=100, output=7)  # 204,000,000 units under the launch card
WHY = {"why": "as agreed"}
EVE = {"authorization": f"Bearer {OPERATOR_TOKEN}", "x-cachesvc-actor": "eve"}


@dataclass(frozen=True, slots=True)
class House:
    """OpenBooks with the tenant `acme`, which has 10 CNY and one settled request, `r1`."""

    books: OpenBooks
    folder: Path
    ledger: TestLedger

    def told(self, *arguments: str) -> Any:
        """What the command line prints with --json for the same data directory."""
        done = CliRunner().invoke(
            command_line, [*arguments, "--json", "--data-dir", str(self.folder)]
        )
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)


@pytest.fixture
def house(tmp_path):
    with running_ledger(database_url(tmp_path), clock=ManualClock(time.time_ns())) as ledger:
        ledger.fund(10 * UNITS)
        ledger.charge("r1", USAGE)
        yield House(books_of(ledger, ReceiptSigner.open(tmp_path)), tmp_path, ledger)
        assert audit.verify(ledger.accounts.store).problems == []


@dataclass(frozen=True, slots=True)
class Asking:
    """An admin's requests below /admin/api."""

    client: httpx.AsyncClient

    async def get(self, path: str) -> Any:
        """The answer's JSON."""
        return self._told(await self.client.get(path))

    async def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
        """The same of a change, with its reason."""
        return self._told(await self.client.post(path, json={**WHY, **body}), status)

    async def refused(self, path: str, body: Any = None) -> tuple[int, str, str | None]:
        """Status, code and parameter of the refusal: of a GET, or of a POST with this body."""
        asked = self.client.get(path) if body is None else self.client.post(path, json=body)
        return refusal_of(await asked)

    def _told(self, answer: httpx.Response, status: int = 200) -> Any:
        assert status == answer.status_code, answer.text
        return answer.json()


def refusal_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} == set(error)
    return answer.status_code, error["code"], error["param"]


@pytest.fixture
async def client(house):
    async with admin_client(fake_parts(books=house.books), path="/admin/api", **EVE) as client:
        yield client


@pytest.fixture
def ask(client):
    return Asking(client)


def last_trail(house: House) -> tuple[str, str, str, str]:
    row = house.books.accounts.trail.newest(1)[0]
    return row["actor"], row["action"], row["subject"], row["reason"]


SPAN = "since=yesterday&until=today&timezone=Asia/Shanghai"
FLAGS = ["--since", "yesterday", "--until", "today", "--timezone", "Asia/Shanghai"]
BY_KEY = ["--breakdown", "key"]
READS = [
    ("/tenants", ["tenants", "show"]),
    ("/tenants/acme", ["tenants", "show", "acme"]),
    ("/keys", ["keys", "list"]),
    ("/prices", ["prices", "show"]),
    ("/usage", ["usage"]),
    ("/usage?unit=day", ["usage", "--by", "day"]),
    ("/usage?unit=month&tenant=acme", ["usage", "--by", "month", "--tenant", "acme"]),
    ("/usage/session", ["usage", "--by", "session"]),
    (f"/usage?unit=day&{SPAN}&breakdown=key", ["usage", "--by", "day", *FLAGS, *BY_KEY]),
    (f"/usage?unit=month&{SPAN}", ["usage", "--by", "month", *FLAGS]),
    (f"/usage/session?{SPAN}", ["usage", "--by", "session", *FLAGS]),
    ("/ledger/rerate", ["prices", "plan"]),
    ("/audit", ["ledger", "show", "--trail"]),
]


def test_every_route_is_documented():
    page = Path("docs/billing.md").read_text()
    missing = []
    for area in (derived.routes_of(APIRoute), ledger_routes.router):
        for route in area.routes:
            assert isinstance(route, APIRoute)
            if not route.include_in_schema or "admin: cache" in route.tags:
                continue
            parent, _, last = route.path.rpartition("/")
            if f"{route.path}`" not in page and not (f"`/{last}`" in page and parent in page):
                missing.append(route.path)
    assert [] == missing


async def test_a_route_says_what_the_command_says(ask, house):
    house.books.accounts.create_key("acme", by="test")
    for path, command in READS:
        assert house.told(*command) == await ask.get(path), path


async def test_a_tenant_from_its_creation_on(ask, house):
    made = await ask.post("/tenants", 201, tenant="bolt")
    told = [made[name] for name in ("tenant", "currency", "prepaid", "balance")]
    assert ["bolt", "CNY", True, "0.00"] == told
    assert ("eve", "tenant.create", "bolt", "as agreed") == last_trail(house)
    assert "12.50" == (await ask.post("/tenants/bolt/limit", credit_limit="12.50"))["available"]
    (changed,) = await ask.get("/audit?limit=1")
    before, after = {"credit_limit": "0.00"}, {"credit_limit": "12.50"}
    assert (before, after) == (changed["before"], changed["after"])
    assert None is (await ask.post("/tenants/bolt/limit", credit_limit=None))["available"]
    assert (await ask.post("/tenants/bolt/suspend"))["suspended"]
    assert ("eve", "tenant.suspend", "bolt", "as agreed") == last_trail(house)
    assert not (await ask.post("/tenants/bolt/resume"))["suspended"]
    (resumed,) = await ask.get("/audit?limit=1")
    assert ({"suspended": True}, {"suspended": False}) == (resumed["before"], resumed["after"])
    await ask.post("/tenants/bolt/projects", 201, project="p1")
    shown = await ask.get("/tenants/bolt")
    assert (["p1"], False) == (shown["projects"], shown["suspended"])
    again = await ask.refused("/tenants", {"tenant": "bolt", **WHY})
    assert (409, "already_exists", None) == again


async def test_a_key_is_shown_once_and_revoked(ask, house):
    body = {"tenant": "acme", "name": "ci", "scopes": ["usage"], "expires_in_s": 3600}
    made = await ask.post("/keys", 201, **body)
    assert house.books.accounts.authenticate(made["key"]).tenant == "acme"
    listed = await ask.get("/keys?tenant=acme")
    assert [{name: made[name] for name in made if name != "key"} | {"last_used": None}] == listed
    assert made["key"] not in json.dumps(house.books.accounts.trail.newest())
    revoked = await ask.post(f"/keys/{made['prefix']}/revoke")
    assert ("revoked", made["id"]) == (revoked["state"], revoked["id"])
    assert ("eve", "key.revoke", made["id"], "as agreed") == last_trail(house)
    assert (404, "not_found", None) == await ask.refused("/keys/key_none/revoke", WHY)


TOPUP = "/balance/acme/topup"
NO_AMOUNTS = ("\uff11", "\u0663", "1,5", "NaN", "1e400", "0", "1." + "0" * 12 + "1", "9" * 16, "-1")
WRONG: list[tuple[str, Any, str, str | None]] = [
    (TOPUP, {"amount": "1"}, "invalid_value", "why"),
    (TOPUP, {"amount": "1", "why": "  "}, "invalid_value", "why"),
    (TOPUP, {"amount": 1.5, **WHY}, "invalid_value", "amount"),
    (TOPUP, {"amount": "1e3x", **WHY}, "invalid_value", None),
    (TOPUP, {"amount": "1", "why": "\u200b"}, "invalid_value", "why"),
    (TOPUP, {"amount": "1", "why": "a\0b"}, "invalid_value", None),
    (TOPUP, {"amount": "1", "reference": "a\nb", **WHY}, "invalid_value", None),
    (TOPUP, {"amount": "1", "refrence": "x", **WHY}, "invalid_value", "refrence"),
    *((TOPUP, {"amount": amount, **WHY}, "invalid_value", None) for amount in NO_AMOUNTS),
    ("/tenants/acme/suspend", {"why": "\x1b[31m"}, "invalid_value", None),
    ("/keys", {"tenant": "acme", "name": "\u202etxt", **WHY}, "invalid_value", None),
    ("/tenants", {"tenant": "x", "credit_limit": "-5", **WHY}, "invalid_value", None),
    ("/tenants/acme/limit", {"credit_limit": "-0.01", **WHY}, "invalid_value", None),
    ("/tenants", {"tenant": "a b", **WHY}, "invalid_value", None),
    ("/tenants", {"tenant": "x", "currency": "yuan", **WHY}, "invalid_value", None),
    ("/tenants", {"tenant": "x", "currency": "EUR", **WHY}, "invalid_value", None),
    ("/tenants/acme/currency", {"currency": "EUR", **WHY}, "invalid_value", None),
    ("/keys", {"tenant": "acme", "scopes": ["root"], **WHY}, "invalid_value", "scopes[0]"),
    ("/keys", {"tenant": "acme", "scopes": [], **WHY}, "invalid_value", "scopes"),
    ("/prices/apply", {"card": {"toml": "[card"}, **WHY}, "invalid_rate_card", None),
    ("/prices/lint", {"card": {}}, "invalid_rate_card", None),
    ("/prices/plan", {"card": {"name": "two-tier"}, "days": 0}, "invalid_value", "days"),
]


async def test_a_wrong_body_is_refused_by_name_and_changes_nothing(ask, house):
    before = house.books.accounts.trail.newest()
    for path, body, code, param in WRONG:
        assert (400, code, param) == await ask.refused(path, body), body
    assert before == house.books.accounts.trail.newest()


async def test_a_removed_value_says_what_to_use_instead(client):
    budget = {"tenant": "acme", "amount": "1", **WHY}
    budget |= {"name": "b", "per": "balance"}
    plan = {"card": {"name": "monthly-plan"}}
    answers = {
        "see BalanceLow": await client.post("/budgets", json=budget),
        "JSON or CSV": await client.get("/usage/statement/acme/2026-01?format=html"),
        "`cachesvc usage export`": await client.post("/prices/plan", json=plan),
    }
    for instead, answer in answers.items():
        said = answer.json()["error"]["message"]
        assert 400 == answer.status_code and "was removed: " in said and instead in said


async def test_invalid_json_and_unknown_names_are_refused(client, ask):
    as_json = {"content-type": "application/json"}
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    for body in (b"{", b"", b"[]", b"\xff", b'"x"', deep):
        answer = await client.post("/tenants", content=body, headers=as_json)
        assert (400, "invalid_json", None) == refusal_of(answer), body[:9]
    as_text = {"content-type": "text/plain"}
    named_text = await client.post("/tenants", content=b"{}", headers=as_text)
    assert (400, "invalid_json", None) == refusal_of(named_text)
    assert "application/json" in named_text.json()["error"]["message"]
    assert (400, "invalid_value", "limit") == await ask.refused("/audit?limit=0")
    beyond = await ask.refused(f"/ledger/entries/acme?before={1 << 63}")
    assert (400, "invalid_value", "before") == beyond
    for path in ("/tenants/nobody", "/balance/nobody", "/usage?tenant=nobody",
                 "/ledger/entries/nobody", "/receipts/acme/none", "/keys?tenant=nobody",
                 "/holds?tenant=nobody", "/usage/session?tenant=nobody",
                 "/ledger/rerate?tenant=nobody"):  # fmt: skip
        assert (404, "not_found", None) == await ask.refused(path), path
    for month in ("2026-13", "0000-01", "9999-12"):
        assert 400 == (await client.get(f"/usage/statement/acme/{month}")).status_code, month
    gone = {"tenant": "acme", "request_id": "none", **WHY}
    assert (404, "not_found", None) == await ask.refused("/ledger/correct", gone)


async def test_a_card_is_linted_planned_and_applied(client, ask, house):
    toml = shipped_cards()["deepseek-launch"].replace('"2024-08-02"', '"2030"')
    toml = toml.replace("2024-08-02T", "2030-01-01T")
    dearer = toml.replace('output = "2"', 'output = "9"')
    gamed = toml.replace('hit = "0.1"', 'hit = "5"')
    assert [] == (await client.post("/prices/lint", json={"card": {"toml": toml}})).json()
    found = (await client.post("/prices/lint", json={"card": {"toml": gamed}})).json()
    assert "hit-above-miss" in {finding["rule"] for finding in found}
    plan = (await client.post("/prices/plan", json={"card": {"toml": dearer}})).json()
    assert ["0.000049"] == [row["change"] for row in plan["rows"]]
    refusal = await ask.refused("/prices/apply", {"card": {"toml": gamed}, **WHY})
    assert (400, "invalid_rate_card", None) == refusal
    assert "2030" == (await ask.post("/prices/apply", card={"toml": dearer}))["version"]
    assert ("eve", "prices.apply", "deepseek-launch 2030", "as agreed") == last_trail(house)
    assert 2 == len(await ask.get("/prices"))
    again = await ask.refused("/prices/apply", {"card": {"toml": toml}, **WHY})
    assert (409, "rate_card_conflict", None) == again
    shown = {"name": "deepseek-launch", "version": "2030"}
    assert dearer == (await client.post("/prices/show", json={"card": shown})).json()["toml"]
    path = {"name": "pyproject.toml"}
    assert (404, "not_found", None) == await ask.refused("/prices/show", {"card": path})


async def test_an_open_hold_says_its_age_and_what_was_sent(ask, house):
    hold = house.ledger.reserve("r2", 3 * UNITS)
    house.books.ledger.top_up(hold, UNITS, usage=Usage(miss=3, output=1)).result()
    (open_hold,) = await ask.get("/holds")
    told = [open_hold[name] for name in ("request_id", "amount", "sent")]
    assert ["r2", "4.00", {"miss": 3, "output": 1}] == told
    assert 0 <= open_hold["age_s"] < 60 < open_hold["expires_in_s"] <= 120
    assert {"r2"} == {row["request_id"] for row in house.told("ledger", "show", "--holds")}
    house.books.ledger.void(hold).result()
    assert [] == await ask.get("/holds?tenant=acme")


async def test_a_charge_is_found_corrected_and_proved(client, ask):
    gone = await client.get("/ledger")
    assert (404, True) == (gone.status_code, "GET /metrics has its counters" in gone.text)
    (charge,) = await ask.get("/ledger/entries/acme?request_id=r1")
    assert ("charge", "-0.000204") == (charge["kind"], charge["amount"])
    assert {"hit_disk": 900, "miss": 100, "output": 7} == charge["details"]["usage"]
    body = {"tenant": "acme", "request_id": "r1", "amount": "0.0001"}
    corrected = await ask.post("/ledger/correct", **body)
    assert ("0.0001", 2) == (corrected["amount"], corrected["details"]["corrects"])
    both = await ask.get("/ledger/entries/acme?request_id=r1")
    assert ["charge", "correction"] == [entry["kind"] for entry in both]
    newest = await ask.get("/ledger/entries/acme?limit=2")
    older = await ask.get("/ledger/entries/acme?before=2")
    assert ([3, 2], [1]) == ([e["entry"] for e in newest], [e["entry"] for e in older])
    proof = (await client.post("/ledger/verify")).json()
    assert (True, 3, []) == (proof["ok"], proof["entries"], proof["problems"])
    heads = await ask.get("/ledger/heads")
    assert {"entry": 3, "hash": corrected["hash"]} == heads.pop("acme")
    assert ["admin trail"] == list(heads)


async def test_a_correction_is_made_once_for_each_reference(ask, house):
    """A reference that stands for another correction is refused, not answered with that one."""
    rest = {"tenant": "acme", "request_id": "r1"}
    first = await ask.post("/ledger/correct", **rest, amount="0.0001")
    assert first == await ask.post("/ledger/correct", **rest, amount="0.0001")
    for other in ({**rest, "amount": "0.0002"}, rest):
        answer = await ask.refused("/ledger/correct", {**other, **WHY})
        assert (409, "already_exists", None) == answer
    for _ in range(2):
        corrected = await ask.post("/ledger/correct", **rest, reference="the rest")
        assert "0.000104" == corrected["amount"]
        assert 10 * UNITS == house.books.accounts.tenant("acme").balance


async def test_statements_and_receipts(client, ask, house):
    month = (await ask.get("/usage?unit=month"))[0]["period"]
    path = f"/usage/statement/acme/{month}"
    assert 1 == (await ask.get(path))["requests"]
    assert 400 == (await client.get(f"{path}?format=html")).status_code
    table = await client.get(f"{path}?format=csv")
    assert "hit_disk" in table.text and "text/csv" in table.headers["content-type"]
    elsewhere = await ask.get(f"{path}?timezone=Pacific/Auckland")
    assert "Pacific/Auckland" == elsewhere["timezone"]
    assert verify_receipt(await ask.get("/receipts/acme/r1"), house.books.signer.public_key)


async def test_an_invalid_span_is_a_400(ask):
    spans = ("since=soon", "until=9999-12-31", "since=today&until=yesterday", "timezone=Europe")
    for query in spans:
        for path in ("?unit=day&", "?unit=month&", "/session?"):
            assert (400, "invalid_value", None) == await ask.refused(f"/usage{path}{query}"), query
