"""/admin/api over a real ledger: what each route says and changes, and that the command line
says the same.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from typer.testing import CliRunner

from api.admin.login.sessions import Admin, Role, Sessions
from api.admin.routes import derived
from api.admin.routes import ledger as ledger_routes
from api.admin.routes import prices as price_routes
from api.app import create_app
from billing.accounts import Accounts
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome
from billing.ledger import Ledger
from billing.money import UNITS
from billing.operations.books import OpenBooks
from billing.prices.cards import default_card, shipped_cards
from billing.proof.prover import Prover
from billing.reports.receipts import ReceiptSigner, verify_receipt
from billing.store.opening import database_url, open_store
from billing.usage import Usage
from cachesvc.cli import app as command_line
from tests.support.admin import OPERATOR_TOKEN, fake_parts
from tests.support.wire import fake_house

USAGE = Usage(hit_disk=900, miss=100, output=7)  # 204,000,000 units under the launch card
WHY = {"why": "as agreed"}


@dataclass(frozen=True, slots=True)
class House:
    """OpenBooks with the tenant `acme`, which has 10 CNY and one settled request, `r1`."""

    books: OpenBooks
    folder: Path

    def reserve(self, request_id: str, units: int = UNITS) -> Any:
        pinned = self.books.ledger.book.at("m", 2 * 10**18, "CNY")
        return self.books.ledger.reserve("acme", request_id, units, pinned).result()

    def told(self, *arguments: str) -> Any:
        """What the command line prints with --json for the same data directory."""
        done = CliRunner().invoke(
            command_line, [*arguments, "--json", "--data-dir", str(self.folder)]
        )
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    store = open_store(database_url(tmp_path))
    accounts = Accounts(store)
    ledger = Ledger(store, accounts, first_card=default_card())
    ledger.start()
    accounts.create_tenant("acme", "CNY", by="test")
    ledger.post(
        Deposit("acme", Kind.TOPUP, amount=10 * UNITS, reference="first", by="test")
    ).result()
    house = House(
        OpenBooks(store, accounts, ledger, Prover(store), ReceiptSigner.open(tmp_path)), tmp_path
    )
    ledger.settle(house.reserve("r1"), USAGE, Outcome.FINISHED).result()
    try:
        yield house
    finally:
        ledger.close()
        assert Prover(store).prove().proof.problems == []
        store.close()


@contextlib.asynccontextmanager
async def serving(**parts: Any) -> AsyncIterator[httpx.AsyncClient]:
    wire = fake_house()
    app = create_app(wire.wire, admin=fake_parts(**parts))
    transport = httpx.ASGITransport(app)
    try:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t/admin/api") as client,
        ):
            yield client
    finally:
        wire.close()


@pytest.fixture
async def client(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(books=house.books) as client:
        client.headers["authorization"] = f"Bearer {OPERATOR_TOKEN}"
        client.headers["x-cachesvc-actor"] = "eve"
        yield client


def last_trail(house: House) -> tuple[str, str, str, str]:
    row = house.books.accounts.trail.newest(1)[0]
    return row["actor"], row["action"], row["subject"], row["reason"]


async def ok(answer: httpx.Response, status: int = 200) -> Any:
    assert status == answer.status_code, answer.text
    return answer.json()


async def refused(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} == set(error)
    return answer.status_code, error["code"], error["param"]


SPAN = "since=yesterday&until=today&timezone=Asia/Shanghai"
FLAGS = ["--since", "yesterday", "--until", "today", "--timezone", "Asia/Shanghai"]
READS = [
    ("/tenants", ["tenants", "show"]),
    ("/tenants/acme", ["tenants", "show", "acme"]),
    ("/keys", ["keys", "list"]),
    ("/prices", ["prices", "show"]),
    ("/usage", ["usage"]),
    ("/usage?unit=day", ["usage", "--by", "day"]),
    ("/usage?unit=month&tenant=acme", ["usage", "--by", "month", "--tenant", "acme"]),
    ("/usage/session", ["usage", "--by", "session"]),
    (
        f"/usage?unit=day&{SPAN}&breakdown=key",
        ["usage", "--by", "day", *FLAGS, "--breakdown", "key"],
    ),
    (f"/usage?unit=month&{SPAN}", ["usage", "--by", "month", *FLAGS]),
    (f"/usage/session?{SPAN}", ["usage", "--by", "session", *FLAGS]),
    ("/ledger/rerate", ["prices", "plan"]),
    ("/audit", ["ledger", "show", "--trail"]),
]


def test_every_route_is_documented() -> None:
    page = Path("docs/billing.md").read_text()
    missing = []
    for area in (derived, price_routes, ledger_routes):
        for route in area.router.routes:
            assert isinstance(route, APIRoute)
            if not route.include_in_schema or "admin: cache" in route.tags:
                continue
            parent, _, last = route.path.rpartition("/")
            if f"{route.path}`" not in page and not (f"`/{last}`" in page and parent in page):
                missing.append(route.path)
    assert [] == missing


async def test_a_route_says_what_the_command_says(client: httpx.AsyncClient, house: House) -> None:
    house.books.accounts.create_key("acme", by="test")
    for path, command in READS:
        assert house.told(*command) == await ok(await client.get(path)), path


async def test_a_tenant_from_its_creation_on(client: httpx.AsyncClient, house: House) -> None:
    made = await ok(await client.post("/tenants", json={"tenant": "bolt", **WHY}), 201)
    assert ("bolt", "CNY", True, "0.00") == (
        made["tenant"],
        made["currency"],
        made["prepaid"],
        made["balance"],
    )
    assert ("eve", "tenant.create", "bolt", "as agreed") == last_trail(house)
    limit = {"credit_limit": "12.50", **WHY}
    assert "12.50" == (await ok(await client.post("/tenants/bolt/limit", json=limit)))["available"]
    (changed,) = await ok(await client.get("/audit?limit=1"))
    assert ({"credit_limit": "0.00"}, {"credit_limit": "12.50"}) == (
        changed["before"],
        changed["after"],
    )
    unlimited = {"credit_limit": None, **WHY}
    assert None is (await ok(await client.post("/tenants/bolt/limit", json=unlimited)))["available"]
    assert (await ok(await client.post("/tenants/bolt/suspend", json=WHY)))["suspended"]
    assert not (await ok(await client.post("/tenants/bolt/resume", json=WHY)))["suspended"]
    assert ("eve", "tenant.suspend", "bolt", "as agreed") == last_trail(house)
    (resumed,) = await ok(await client.get("/audit?limit=1"))
    assert ({"suspended": True}, {"suspended": False}) == (resumed["before"], resumed["after"])
    await ok(await client.post("/tenants/bolt/projects", json={"project": "p1", **WHY}), 201)
    shown = await ok(await client.get("/tenants/bolt"))
    assert (["p1"], False) == (shown["projects"], shown["suspended"])
    assert (409, "already_exists", None) == await refused(
        await client.post("/tenants", json={"tenant": "bolt", **WHY})
    )


async def test_a_key_is_shown_once_and_revoked(client: httpx.AsyncClient, house: House) -> None:
    body = {"tenant": "acme", "name": "ci", "scopes": ["usage"], "expires_in_s": 3600, **WHY}
    made = await ok(await client.post("/keys", json=body), 201)
    assert house.books.accounts.authenticate(made["key"]).tenant == "acme"
    listed = await ok(await client.get("/keys?tenant=acme"))
    assert [{name: made[name] for name in made if name != "key"} | {"last_used": None}] == listed
    assert made["key"] not in json.dumps(house.books.accounts.trail.newest())
    revoked = await ok(await client.post(f"/keys/{made['prefix']}/revoke", json=WHY))
    assert ("revoked", made["id"]) == (revoked["state"], revoked["id"])
    assert ("eve", "key.revoke", made["id"], "as agreed") == last_trail(house)
    assert (404, "not_found", None) == await refused(
        await client.post("/keys/key_none/revoke", json=WHY)
    )


async def test_money_is_given_once_for_each_reference(
    client: httpx.AsyncClient, house: House
) -> None:
    body = {"amount": "2.5", "reference": "inv-7", **WHY}
    for _ in range(2):
        shown = await ok(await client.post("/balance/acme/topup", json=body))
    assert "12.499796" == shown["topped_up"]
    granted = await ok(await client.post("/balance/acme/grant", json={"amount": "1", **WHY}))
    assert "1.00" == granted["granted"]
    actor, action, _, why = last_trail(house)
    assert ("eve", "balance.grant", "as agreed") == (actor, action, why)
    other = body | {"amount": "3"}
    assert 409 == (await client.post("/balance/acme/topup", json=other)).status_code


WRONG: list[tuple[str, Any, str, str | None]] = [
    ("/balance/acme/topup", {"amount": "1"}, "invalid_value", "why"),
    ("/balance/acme/topup", {"amount": "1", "why": "  "}, "invalid_value", "why"),
    ("/balance/acme/topup", {"amount": 1.5, **WHY}, "invalid_value", "amount"),
    ("/balance/acme/topup", {"amount": "1e3x", **WHY}, "invalid_value", None),
    ("/balance/acme/topup", {"amount": "1", "why": "\u200b"}, "invalid_value", "why"),
    ("/balance/acme/topup", {"amount": "1", "why": "a\0b"}, "invalid_value", None),
    ("/balance/acme/topup", {"amount": "1", "reference": "a\nb", **WHY}, "invalid_value", None),
    ("/tenants/acme/suspend", {"why": "\x1b[31m"}, "invalid_value", None),
    ("/keys", {"tenant": "acme", "name": "\u202etxt", **WHY}, "invalid_value", None),
    ("/tenants", {"tenant": "x", "credit_limit": "-5", **WHY}, "invalid_value", None),
    ("/tenants/acme/limit", {"credit_limit": "-0.01", **WHY}, "invalid_value", None),
    *(
        ("/balance/acme/topup", {"amount": amount, **WHY}, "invalid_value", None)
        for amount in (
            "\uff11",
            "\u0663",
            "1,5",
            "NaN",
            "1e400",
            "0",
            "1." + "0" * 12 + "1",
            "9" * 16,
        )
    ),
    ("/balance/acme/topup", {"amount": "-1", **WHY}, "invalid_value", None),
    ("/balance/acme/topup", {"amount": "1", "refrence": "x", **WHY}, "invalid_value", "refrence"),
    ("/tenants", {"tenant": "a b", **WHY}, "invalid_value", None),
    ("/tenants", {"tenant": "x", "currency": "yuan", **WHY}, "invalid_value", None),
    ("/tenants", {"tenant": "x", "currency": "EUR", **WHY}, "invalid_value", None),
    ("/tenants/acme/currency", {"currency": "EUR", **WHY}, "invalid_value", None),
    ("/keys", {"tenant": "acme", "scopes": ["root"], **WHY}, "invalid_value", "scopes[0]"),
    ("/keys", {"tenant": "acme", "scopes": [], **WHY}, "invalid_value", "scopes"),
    ("/prices/apply", {"card": {"toml": "[card"}, **WHY}, "invalid_rate_card", None),
    ("/prices/lint", {}, "invalid_rate_card", None),
    ("/prices/plan", {"card": {"name": "two-tier"}, "days": 0}, "invalid_value", "days"),
]


async def test_a_wrong_body_is_refused_by_name_and_changes_nothing(
    client: httpx.AsyncClient, house: House
) -> None:
    before = house.books.accounts.trail.newest()
    for path, body, code, param in WRONG:
        assert (400, code, param) == await refused(await client.post(path, json=body)), body
    assert before == house.books.accounts.trail.newest()


async def test_a_removed_value_says_what_to_use_instead(client: httpx.AsyncClient) -> None:
    budget = {"tenant": "acme", "amount": "1", **WHY}
    answers = {
        "see BalanceLow": await client.post("/budgets/b", json=budget | {"per": "balance"}),
        "JSON or CSV": await client.get("/usage/statement/acme/2026-01?format=html"),
        "`cachesvc usage export`": await client.post(
            "/prices/plan", json={"card": {"name": "monthly-plan"}}
        ),
    }
    for instead, answer in answers.items():
        said = answer.json()["error"]["message"]
        assert 400 == answer.status_code and "was removed: " in said and instead in said


async def test_invalid_json_and_unknown_names_are_refused(client: httpx.AsyncClient) -> None:
    assert (400, "invalid_json", None) == await refused(
        await client.post("/tenants", content=b"{", headers={"content-type": "application/json"})
    )
    as_json = {"content-type": "application/json"}
    for body in (b"", b"[]", b"\xff", b'"x"', b'{"a":' * 100_000 + b"1" + b"}" * 100_000):
        answer = await client.post("/tenants", content=body, headers=as_json)
        assert (400, "invalid_json", None) == await refused(answer), body[:9]
    named_text = await client.post(
        "/tenants", content=b"{}", headers={"content-type": "text/plain"}
    )
    assert (400, "invalid_json", None) == await refused(named_text)
    assert "application/json" in named_text.json()["error"]["message"]
    assert (400, "invalid_value", "limit") == await refused(await client.get("/audit?limit=0"))
    beyond = await client.get(f"/ledger/entries/acme?before={1 << 63}")
    assert (400, "invalid_value", "before") == await refused(beyond)
    for path in ("/tenants/nobody", "/balance/nobody", "/usage?tenant=nobody",
                 "/ledger/entries/nobody", "/receipts/acme/none", "/keys?tenant=nobody",
                 "/holds?tenant=nobody", "/usage/session?tenant=nobody",
                 "/ledger/rerate?tenant=nobody"):  # fmt: skip
        assert (404, "not_found", None) == await refused(await client.get(path)), path
    for month in ("2026-13", "0000-01", "9999-12"):
        assert 400 == (await client.get(f"/usage/statement/acme/{month}")).status_code, month
    gone = {"tenant": "acme", "request_id": "none", **WHY}
    assert (404, "not_found", None) == await refused(
        await client.post("/ledger/correct", json=gone)
    )


async def test_a_card_is_linted_planned_and_applied(
    client: httpx.AsyncClient, house: House
) -> None:
    toml = shipped_cards()["deepseek-launch"].replace('"2024-08-02"', '"2030"')
    toml = toml.replace("2024-08-02T", "2030-01-01T")
    dearer = toml.replace('output = "2"', 'output = "9"')
    assert [] == await ok(await client.post("/prices/lint", json={"toml": toml}))
    gamed = toml.replace('hit = "0.1"', 'hit = "5"')
    found = await ok(await client.post("/prices/lint", json={"toml": gamed}))
    assert "hit-above-miss" in {finding["rule"] for finding in found}
    plan = await ok(await client.post("/prices/plan", json={"card": {"toml": dearer}}))
    assert ["0.000049"] == [row["change"] for row in plan["rows"]]
    refusal = await client.post("/prices/apply", json={"card": {"toml": gamed}, **WHY})
    assert (400, "invalid_rate_card", None) == await refused(refusal)
    applied = await client.post("/prices/apply", json={"card": {"toml": dearer}, **WHY})
    assert "2030" == (await ok(applied))["version"]
    assert ("eve", "prices.apply", "deepseek-launch 2030", "as agreed") == last_trail(house)
    assert 2 == len(await ok(await client.get("/prices")))
    again = await client.post("/prices/apply", json={"card": {"toml": toml}, **WHY})
    assert (409, "rate_card_conflict", None) == await refused(again)
    shown = {"name": "deepseek-launch", "version": "2030"}
    assert dearer == (await ok(await client.post("/prices/show", json=shown)))["toml"]
    path = {"name": "pyproject.toml"}
    assert (404, "not_found", None) == await refused(await client.post("/prices/show", json=path))


async def test_an_open_hold_says_its_age_and_what_was_sent(
    client: httpx.AsyncClient, house: House
) -> None:
    hold = house.reserve("r2", 3 * UNITS)
    house.books.ledger.top_up(hold, UNITS, usage=Usage(miss=3, output=1)).result()
    (open_hold,) = await ok(await client.get("/holds"))
    assert ("r2", "4.00", {"miss": 3, "output": 1}) == (
        open_hold["request_id"],
        open_hold["amount"],
        open_hold["sent"],
    )
    assert 0 <= open_hold["age_s"] < 60 < open_hold["expires_in_s"] <= 120
    assert {"r2"} == {row["request_id"] for row in house.told("ledger", "show", "--holds")}
    house.books.ledger.void(hold).result()
    assert [] == await ok(await client.get("/holds?tenant=acme"))


async def test_a_charge_is_found_corrected_and_proved(
    client: httpx.AsyncClient, house: House
) -> None:
    state = await ok(await client.get("/ledger"))
    assert (2, 0, 1, None) == (
        state["entries"],
        state["holds"],
        state["settled"],
        state["proof"],
    )
    (charge,) = await ok(await client.get("/ledger/entries/acme?request_id=r1"))
    assert ("charge", "-0.000204", {"hit_disk": 900, "miss": 100, "output": 7}) == (
        charge["kind"],
        charge["amount"],
        charge["details"]["usage"],
    )
    body = {"tenant": "acme", "request_id": "r1", "amount": "0.0001", **WHY}
    corrected = await ok(await client.post("/ledger/correct", json=body))
    assert ("0.0001", 2) == (corrected["amount"], corrected["details"]["corrects"])
    both = await ok(await client.get("/ledger/entries/acme?request_id=r1"))
    assert ["charge", "correction"] == [entry["kind"] for entry in both]
    newest = await ok(await client.get("/ledger/entries/acme?limit=2"))
    assert [3, 2] == [entry["entry"] for entry in newest]
    older = await ok(await client.get("/ledger/entries/acme?before=2"))
    assert [1] == [entry["entry"] for entry in older]
    proof = await ok(await client.post("/ledger/verify"))
    assert (True, 3, []) == (proof["ok"], proof["entries"], proof["problems"])
    assert proof == (await ok(await client.get("/ledger")))["proof"]
    heads = await ok(await client.get("/ledger/heads"))
    assert {"entry": 3, "hash": corrected["hash"]} == heads.pop("acme")
    assert ["admin trail"] == list(heads)


async def test_a_correction_is_made_once_for_each_reference(
    client: httpx.AsyncClient, house: House
) -> None:
    """A reference that stands for another correction is refused, not answered with that one."""
    body = {"tenant": "acme", "request_id": "r1", "amount": "0.0001", **WHY}
    first = await ok(await client.post("/ledger/correct", json=body))
    assert first == await ok(await client.post("/ledger/correct", json=body))
    rest = {name: body[name] for name in body if name != "amount"}
    for other in (body | {"amount": "0.0002"}, rest):
        answer = await client.post("/ledger/correct", json=other)
        assert (409, "already_exists", None) == await refused(answer)
    last = rest | {"reference": "the rest"}
    for _ in range(2):
        corrected = await ok(await client.post("/ledger/correct", json=last))
        assert ("0.000104", 10 * UNITS) == (
            corrected["amount"],
            house.books.accounts.tenant("acme").balance,
        )


async def test_statements_and_receipts(client: httpx.AsyncClient, house: House) -> None:
    month = (await ok(await client.get("/usage?unit=month")))[0]["period"]
    path = f"/usage/statement/acme/{month}"
    assert 1 == (await ok(await client.get(path)))["requests"]
    assert 400 == (await client.get(f"{path}?format=html")).status_code
    assert "hit_disk" in (await client.get(f"{path}?format=csv")).text
    elsewhere = await ok(await client.get(f"{path}?timezone=Pacific/Auckland"))
    assert "Pacific/Auckland" == elsewhere["timezone"]
    receipt = await ok(await client.get("/receipts/acme/r1"))
    assert verify_receipt(receipt, house.books.signer.public_key)


@pytest.mark.parametrize(
    "query", ["since=soon", "until=9999-12-31", "since=today&until=yesterday", "timezone=Europe"]
)
async def test_an_invalid_span_is_a_400(client: httpx.AsyncClient, query: str) -> None:
    for path in ("?unit=day&", "?unit=month&", "/session?"):
        answer = await refused(await client.get(f"/usage{path}{query}"))
        assert (400, "invalid_value", None) == answer
    answer = await refused(await client.get("/usage/session?tenant=nobody"))
    assert (404, "not_found", None) == answer


async def test_a_reader_looks_and_changes_nothing(house: House) -> None:
    sessions = Sessions()
    token, session = sessions.open(Admin("rita", Role.READER))
    async with serving(books=house.books, sessions=sessions) as client:
        client.cookies.set("cachesvc_admin_80", token)
        client.headers["X-CSRF-Token"] = session.csrf_token
        await ok(await client.get("/tenants"))
        await ok(await client.post("/prices/lint", json={"name": "two-tier"}))
        await ok(await client.post("/ledger/verify"))
        before = house.books.accounts.trail.newest()
        for path in ("/tenants", "/keys", "/tenants/acme/suspend", "/balance/acme/grant",
                     "/prices/apply", "/ledger/correct"):  # fmt: skip
            answer = await client.post(path, json={**WHY, "tenant": "acme", "amount": "1"})
            assert 403 == answer.status_code, path
        assert before == house.books.accounts.trail.newest()


async def test_without_a_login_nothing_is_said() -> None:
    async with serving() as client:
        assert 401 == (await client.get("/tenants")).status_code
        assert 401 == (await client.post("/tenants", json=WHY)).status_code
