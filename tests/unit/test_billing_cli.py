"""The commands about money, called as a user calls them."""

import inspect
import json
import logging
import re
import time
from datetime import UTC, datetime
from functools import partial

import pytest
import structlog
from rich.console import Console

from api.admin.router import admin_router
from api.admin.routes.operation_table import PREFIX, TABLE, operation_of
from api.app import create_app
from billing.accounts import Accounts
from billing.ledger import Ledger
from billing.operations.books import OpenBooks
from billing.proof.prover import Prover
from billing.reports.receipts import ReceiptSigner
from billing.store.opening import database_url, open_store
from billing.usage import Usage
from cachesvc.cli import render
from cachesvc.cli.money import invocation
from tests.running_server import announcing
from tests.support.admin import fake_parts
from tests.support.billing import ManualClock, running_ledger
from tests.support.commands import call
from tests.support.wire import fake_house

CARD = '[card]\nname="c"\nversion="9"\nvalid_from=2020-01-01T00:00:00Z\ncurrency="CNY"\n'
USD_CARD = CARD.replace("CNY", "USD") + (
    '[[model]]\nmatch="qwen*"\nhit=0.1\nhit_disk=0.25\nmiss=1\noutput=3\ncache_write=0.25\n'
    "cache_write_1h=1\n"
)
MODEL = '[[model]]\nmatch="*"\nhit=0.2\nmiss=2\noutput=4\n'


class Shell:
    """Runs commands on one data directory."""

    def __init__(self, data_dir):
        self.data_dir = data_dir

    def __call__(self, *args, code=0, **options):
        ended = call(*args, "--data-dir", self.data_dir, **options)
        assert ended.exit_code == code, ended.output + repr(ended.exception)
        return ended.output

    def json(self, *args):
        return json.loads(self(*args, "--json"))

    def says(self, *args, code):
        return " ".join(self(*args, code=code).split())


@pytest.fixture
def closed(tmp_path):
    """A data directory that no server runs on."""
    return Shell(tmp_path / "data")


@pytest.fixture(params=["closed", "served"])
def shell(request, closed):
    """The same directory without a server and with one: commands must not tell the difference."""
    if request.param == "closed":
        yield closed
        return
    closed.data_dir.mkdir()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    store = open_store(database_url(closed.data_dir))
    accounts = Accounts(store)
    ledger = Ledger(store, accounts, owner="live")
    ledger.start()
    signer = ReceiptSigner.open(closed.data_dir)
    books = OpenBooks(store, accounts, ledger, Prover(store), signer)
    with announcing(closed.data_dir, fake_parts(books=books), fake_house()):
        yield closed
    ledger.close()
    store.close()


def use(shell):
    """One request of tenant acme, settled by a server."""
    clock = ManualClock(time.time_ns())
    with running_ledger(f"sqlite:///{shell.data_dir / 'ledger.sqlite3'}", clock=clock) as house:
        house.charge("r1", Usage(hit_disk=900, miss=100, output=7), session="chat")


def test_a_tenant_is_made_funded_used_and_proved(shell):
    made = shell.json("tenants", "create", "acme")
    assert (made["currency"], made["prepaid"]) == ("CNY", True)
    assert shell.json("balance", "topup", "acme", "12.5")["available"] == "12.50"
    assert shell.json("balance", "grant", "acme", "1")["granted"] == "1.00"
    use(shell)
    assert shell.json("tenants", "show", "acme")["balance"] == "13.499796"
    usage = shell.json("usage")
    assert (usage[0]["hit_tokens"], usage[0]["amount"]) == (900, "0.000204")
    assert shell.json("usage", "--by", "month")[0]["period"] == datetime.now(UTC).strftime("%Y-%m")
    assert shell.json("usage", "--by", "day")[0]["requests"] == 1
    assert shell.json("usage", "--by", "session")[0]["period"] == "chat"
    assert shell.json("ledger", "verify")["ok"] is True
    assert "proved: 3 entries of 2 tenants" in shell("ledger", "verify")
    actions = [row["action"] for row in shell.json("ledger", "show", "--trail")]
    assert actions == [
        *("tenant.create", "prices.apply"),  # of the server, for open mode
        *("balance.grant", "balance.topup", "tenant.create"),
    ]
    assert shell.json("prices", "plan", "--days", "3660")["rows"][0]["requests"] == 1


def test_the_ledger_of_the_environment_is_opened_as_a_server_does(closed, tmp_path, monkeypatch):
    """Beside a stopped server on PostgreSQL, a command made and proved an empty SQLite ledger."""
    assert "there is no ledger" in closed("usage", code=1)
    assert not closed.data_dir.exists()
    url = f"sqlite:///{tmp_path / 'elsewhere.sqlite3'}"
    monkeypatch.setenv("CACHESVC_BILLING__DATABASE_URL", url)
    closed("tenants", "create", "acme")
    assert not (closed.data_dir / "ledger.sqlite3").exists()
    monkeypatch.delenv("CACHESVC_BILLING__DATABASE_URL")
    assert "acme" in closed("tenants", "show", "--database-url", url)


def test_a_key_is_printed_once_and_listed_by_its_prefix(shell):
    shell("tenants", "create", "acme")
    shell("keys", "create", "--tenant", "acme", "--scope", "admin", "--scope", "inference,usage")
    assert ["inference", "usage", "admin"] == shell.json("keys", "list")[0]["scopes"]
    made = shell.json("keys", "create", "--tenant", "acme", "--name", "laptop")
    listed = shell("keys", "list")
    assert made["key"].startswith("sk-") and made["key"] not in listed
    assert made["prefix"] in listed
    assert shell.json("keys", "revoke", made["id"])["state"] == "revoked"


def test_an_statement_a_receipt_and_an_export_are_printed(shell, tmp_path):
    shell("tenants", "create", "acme")
    use(shell)
    statement = ("usage", "--statement", f"{datetime.now(UTC):%Y-%m}", "--tenant", "acme")
    assert json.loads(shell(*statement))["exact"] == "0.000204"
    assert shell(*statement, "--format", "csv").startswith("tenant,")
    assert json.loads(shell("usage", "receipt", "acme", "r1"))["amount"] == "0.000204"
    out = tmp_path / "focus.csv"
    for _ in range(2):
        shell("usage", "export", "--to", str(out))
    assert len(out.read_text().splitlines()) == 4  # a header and three lines of one charge


def test_a_card_is_exported_as_litellms_price_map(tmp_path):
    """LiteLLM itself adds these up as we do: `tests/clients/test_prices.py`."""
    card, export = tmp_path / "usd.toml", partial(call, "prices", "export")
    card.write_text(USD_CARD)
    assert {
        "qwen3-8b": {
            "litellm_provider": "openai",
            "mode": "chat",
            "input_cost_per_token": 1e-6,
            "output_cost_per_token": 3e-6,
            "cache_read_input_token_cost": 2.5e-7,
            "cache_creation_input_token_cost": 1.25e-6,
            "cache_creation_input_token_cost_above_1hr": 2e-6,
        }
    } == json.loads(export(card, "--model", "qwen3-8b").stdout)
    assert "no price for model 'gpt'" in export(card, "--model", "gpt").stderr
    assert "LiteLLM counts in USD" in export("deepseek-launch", "--model", "m").stderr


def test_a_card_is_linted_planned_and_applied(shell, tmp_path):
    shell("tenants", "create", "acme")
    use(shell)
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(CARD + MODEL)
    bad.write_text(CARD + MODEL + "storage=0\n")
    plan = shell.json("prices", "plan", str(good), "--days", "3660")
    assert plan["rows"][0]["planned"] == "0.000408"
    for file, code in ((good, 0), (bad, 1)):
        assert call("prices", "show", "--lint", file).exit_code == code
    shell("prices", "apply", str(bad), code=1)
    assert "in force from 2020-01-01" in shell("prices", "apply", str(good))
    assert "nothing changed" in shell("prices", "apply", str(good))
    good.write_text(CARD + MODEL.replace("miss=2", "miss=3"))
    assert "another version" in shell("prices", "apply", str(good), code=1)
    trail = shell.json("ledger", "show", "--trail")
    assert len([t for t in trail if t["action"] == "prices.apply"]) == 2
    assert [card["version"] for card in shell.json("prices", "show")] == ["2024-08-02", "9"]


NOBODY = "tenant 'nobody' does not exist"


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("tenants show nobody", 1, "tenants create nobody"),
        ("tenants create acme", 1, "exists already"),
        ("keys list --tenant nobody", 1, "does not exist"),
        ("ledger show nobody --holds", 1, "does not exist"),
        ("keys revoke key_none", 1, "no API key"),
        ("ledger correct acme r9 --reason x", 1, "never charged"),
        ("ledger show acme r9", 1, "never charged"),
        ("usage --tenant nobody", 1, NOBODY),
        ("usage --by session --tenant nobody", 1, NOBODY),
        ("prices plan --tenant nobody", 1, NOBODY),
        ("prices plan two-tier --tenant nobody", 1, NOBODY),
        ("usage receipt nobody r1", 1, NOBODY),
        ("ledger correct nobody r1 --reason x", 1, NOBODY),
        ("balance topup acme 1e3", 2, "not an amount"),
        ("keys create --tenant acme --scopes root", 2, "inference"),
        ("keys create --tenant acme --expires-in soon", 2, "is not a duration"),
        ("keys create --tenant acme --expires-in 0d", 2, "for 1s to 36600d"),
        ("keys create --tenant acme --expires-in \u0663d", 2, "is not a duration"),
        ("tenants create bolt --postpaid=-5", 2, "below zero"),
        ("usage --statement May --tenant acme", 2, "2026-11"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(shell, command, code, says):
    shell("tenants", "create", "acme")
    assert says in shell.says(*command.split(), code=code)
    assert "not a name" in shell.says("tenants", "create", "a b", code=2)


def test_everything_fits_80_columns_and_the_fields_of_json_stay(shell, monkeypatch):
    """What has no room is left out and named; no number is broken."""
    shell("tenants", "create", "acme", "--reason", "signed up")
    shell("keys", "create", "--tenant", "acme", "--name", "laptop")
    use(shell)
    narrow = partial(Console, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(render, "Console", narrow)
    for command in (
        *("usage", "usage --by day", "ledger show --trail", "ledger show --holds"),
        *("tenants show", "keys list", "prices show", "prices plan peak-off-peak"),
    ):
        said = shell(*command.split()).splitlines()
        assert [] == [line for line in said if len(line.rstrip()) > 80 and "not shown" not in line]
    assert_fields(shell)
    usage = shell("usage").splitlines()
    assert "rebuilt from 1 entry" in shell("ledger", "verify", "--rebuild")
    assert "0.000204 CNY" in usage[1]
    assert "not shown here" in usage[2] and "device" in usage[2] and "cost" not in usage[2]


def test_a_grant_that_expires_is_given_and_shown(shell):
    shell("tenants", "create", "acme")
    shell("balance", "grant", "acme", "5", "--reference", "welcome", "--expires", "90d")
    shell("balance", "grant", "acme", "1", "--reference", "sorry")
    first, last = shell.json("tenants", "show", "acme")["grants"]
    assert ("welcome", "5.00") == (first["reference"], first["left"])
    assert ("sorry", None) == (last["reference"], last["expires_ns"])
    said = shell("balance", "grant", "acme", "5", "--expires", "2020-01-01", code=2)
    assert "2020-01-01 is not from today" in said


def test_a_currency_needs_a_card_and_stays_once_something_is_booked(shell):
    said = shell("tenants", "create", "acme", "--currency", "USD", code=2)
    assert "no rate card in USD prices requests of 'acme'" in said and "or take CNY" in said
    assert "it is charged in CNY, as the newest rate card" in shell("tenants", "create", "acme")
    assert "'acme' has no price in CNY for any model" in shell("prices", "apply", "two-tier")
    shell("prices", "apply", "deepseek-launch")
    assert "no price" not in shell("prices", "apply", "long-prompts")
    assert "USD" in shell("tenants", "set", "acme", "--currency", "USD")
    assert "is charged" not in shell("tenants", "create", "bolt", "--currency", "CNY")
    shell("balance", "topup", "acme", "5")
    said = shell("tenants", "set", "acme", "--currency", "CNY", code=1)
    assert "the ledger of 'acme' has entries in USD" in said
    shell("ledger", "verify")


FIELDS = {
    "tenants show": """tenant currency prepaid credit_limit suspended granted topped_up owed balance
        held available entries""",
    "keys list": """id prefix tenant project name scopes state created_ns expires_ns revoked_ns
        last_used""",
    "usage --by month": """tenant period currency requests prompt_tokens hit_tokens amount saved
        hit_device_tokens hit_host_tokens hit_disk_tokens hit_remote_tokens miss_tokens
        output_tokens cache_write_tokens storage_token_hours""",
    "prices show": """name version currency valid_from_ns time_zone minimum_cached_tokens windows
        holidays models""",
    "ledger show --trail": "seq at_ns actor action subject before after reason",
}


def assert_fields(shell):
    """Programs read them: add, but do not rename or remove."""
    for command, fields in FIELDS.items():
        found = shell.json(*command.split())[0].keys()
        assert set() == set(fields.split()) - found, command


def test_limits_of_a_tenant_are_set_and_given_back(shell):
    shell("tenants", "create", "acme")
    shell("tenants", "set", "acme", "--limit", "requests=60", "--limit", "concurrency=0")
    limits = shell.json("tenants", "show", "acme")["rate_limits"]
    assert {"requests": 60, "concurrency": 0} == limits
    assert "requests=60 concurrency=none" in shell("tenants", "show", "acme")
    shell("tenants", "set", "acme", "--limit", "requests=default")
    assert {"concurrency": 0} == shell.json("tenants", "show", "acme")["rate_limits"]
    assert "write NAME=N" in shell("tenants", "set", "acme", "--limit", "request=6", code=2)
    assert "write NAME=N" in shell("tenants", "set", "acme", "--limit", "requests=-6", code=2)
    assert "there is no limit" in shell("tenants", "set", "acme", "--limit", "x=default", code=2)
    assert "does not exist" in shell("tenants", "set", "bolt", "--limit", "requests=6", code=1)
    (newest, *_) = shell.json("ledger", "show", "--trail")
    assert ("tenant.rates", "acme") == (newest["action"], newest["subject"])


def test_every_operation_has_the_route_that_commands_call():
    """Each argument is in the path, a query parameter of the GET, or a field of the POST's body."""
    document = create_app(fake_house().wire, routers=(admin_router(fake_parts()),)).openapi()
    for row in TABLE:
        operation = row.function()
        assert row is operation_of(operation)
        route = document["paths"][PREFIX + row.path][row.method.lower()]
        taken = {parameter["name"] for parameter in route.get("parameters", ())}
        if "requestBody" in route:
            body = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            taken |= document["components"]["schemas"][body.rpartition("/")[2]]["properties"].keys()
        assert set(inspect.signature(operation).parameters) - {"books", "request", "by"} <= taken, (
            operation
        )


def test_a_database_that_is_named_is_opened_beside_the_server(closed, tmp_path):
    """No server is asked about a database that it may not serve."""
    url = f"sqlite:///{tmp_path / 'other.sqlite3'}"
    closed.data_dir.mkdir()
    with announcing(closed.data_dir, fake_parts(books=None), fake_house()):
        assert "The server failed" in closed("tenants", "show", code=1)
        closed("tenants", "create", "bolt", "--database-url", url)
        assert "does not exist" in closed("tenants", "show", "acme", "--database-url", url, code=1)


def test_a_broken_ledger_ends_with_1_and_names_the_entry(shell):
    shell("tenants", "create", "acme")
    use(shell)
    heads = shell.data_dir / "heads.json"
    heads.write_text(shell("ledger", "verify", "--print-heads"))
    shell("ledger", "verify", "--heads", str(heads))
    store = open_store(f"sqlite:///{shell.data_dir / 'ledger.sqlite3'}")
    with store.writing() as connection:
        connection.exec_driver_sql("DROP TRIGGER entries_no_update")
        connection.exec_driver_sql("UPDATE entries SET body = replace(body, 'chat', 'chap')")
    store.close()
    said = shell("ledger", "verify", code=1)
    assert "entry 1 of tenant 'acme' (request 'r1') is not chained" in said


@pytest.fixture
def person(shell, monkeypatch):
    """A person at a terminal, who answers; returns what the terminal shows."""

    def types(answers, *args, code=0):
        with monkeypatch.context() as sitting:
            sitting.setattr(invocation, "must_ask", lambda yes: not yes)
            return " ".join(shell(*args, code=code, input="\n".join([*answers, ""])).split())

    return types


def test_a_person_is_shown_and_asked_before_money_moves(shell, person, tmp_path):
    shell("tenants", "create", "acme")
    topup = ("balance", "topup", "acme", "10")
    said = person("n", *topup, code=1)
    assert "acme has 0.00 CNY" in said and "Book a topup of 10.00 CNY for acme?" in said
    assert "nothing was changed" in said
    person("y", *topup, "--why", "bank")
    said = person("yn", *topup, code=1)  # within a minute
    assert "The same was booked" in said
    person("yy", *topup)
    person("", *topup, "--yes")
    assert "30.00" == shell.json("tenants", "show", "acme")["balance"]
    newest, was, named, *_ = shell("ledger", "show", "--trail").splitlines()
    assert re.match(r" +\d+  \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ  .*  balance.topup  acme/3$", newest)
    assert "balance 20.00 -> 30.00" == was.strip()
    assert named.strip().startswith("reference topup_")
    assert "why: bank" in shell("ledger", "show", "--trail")
    back = ("balance", "withdraw", "acme", "3", "--why", "paid back")
    person("y", *back)
    assert "The same was booked" in person("yn", *back, code=1)
    owing = ("tenants", "set", "acme", "--postpaid", "5")
    assert "Let acme owe up to 5?" in person("n", *owing, code=1)
    card = tmp_path / "card.toml"
    card.write_text(CARD + MODEL)
    assert "Apply c 9, for good?" in person("n", "prices", "apply", str(card), code=1)
    shell("prices", "apply", "deepseek-launch")
    use(shell)
    correct = ("ledger", "correct", "acme", "r1", "--why", "slow")
    said = person("n", *correct, code=1)
    assert "request 'r1' of acme was charged, and 0.000204 CNY are left of it" in said
    assert "gives back 0.000204 CNY" in person("y", *correct)
