"""What the settings of billing and limits make of the money half."""

import json
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from api.access.rate_limits import Quota
from api.collaborators import WireSettings
from billing.errors import ReceiptKeyError
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome
from billing.money import UNITS
from billing.usage import HIT_CLASSES, Usage
from cachesvc.config.errors import ConfigError
from cachesvc.config.sources import load_settings
from cachesvc.server.money import LEASE_S, open_money
from tests.support.commands import said


@contextmanager
def money_of(data_dir, **flags):
    named = {name.replace("__", "."): value for name, value in flags.items()}
    money = open_money(load_settings({"server.data_dir": data_dir} | named).settings)
    try:
        yield money
    finally:
        money.close()


@pytest.mark.parametrize("applied", [False, True])
def test_a_new_ledger_begins_with_the_launch_card_unless_one_was_applied(tmp_path, caplog, applied):
    if applied:
        said("prices", "apply", "two-tier", "--data-dir", tmp_path)
    name = "two-tier" if applied else "deepseek-launch"
    for is_first in (not applied, False):
        caplog.clear()
        with caplog.at_level("INFO"), money_of(tmp_path) as money:
            money.start(lambda *_: None)
            assert [name] == [card.name for card in money.accounts.book.cards]
        assert is_first == ("charged in CNY, by rate card deepseek-launch" in caplog.text)
        assert is_first == ("tenants set default --currency CODE" in caplog.text)


def test_a_lease_outlasts_what_a_live_request_may_wait():
    """A client that reads nothing for a while, or a long queue, must not end a hold."""
    wire = WireSettings()
    assert 2 * max(wire.write_timeout_s, wire.keepalive_s) <= LEASE_S


def test_quotas_of_one_tenant_and_one_key(tmp_path):
    tenants = {"vip": {"requests": 9, "concurrency": 0}}
    keys = {"*": {"requests": 3}}
    with money_of(tmp_path, limits__tenants=tenants, limits__keys=keys) as money:
        settings = money.limits.__getattribute__("_settings")
        assert {"vip": Quota(requests=9)} == settings.tenants
        assert (Quota(), Quota(requests=3)) == (settings.tenant, settings.key)
    with pytest.raises(ConfigError, match="concurency"):
        load_settings({"limits.tenants": {"vip": {"concurency": 1}}})


@pytest.mark.parametrize(
    "url", ["foo://x", "redis://:bad:x", "rediss+wrong://user:hunter2@host:6379/0"]
)
def test_a_wrong_url_of_the_limits_is_said_at_the_start(tmp_path, url):
    """Without its password, and also where no setting limits anybody: an admin may, at any time."""
    settings = load_settings({"server.data_dir": tmp_path, "limits.url": url})
    with pytest.raises(ConfigError, match=r"limits\.url") as refused:
        open_money(settings.settings)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("held", [b"", b"00ff", b"no hex\xff"])
@pytest.mark.parametrize("name", ["secret", "receipt_key"])
def test_a_broken_secret_is_named_and_leaves_nothing_open(tmp_path, name, held):
    (tmp_path / name).write_bytes(held)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises((ConfigError, ReceiptKeyError), match=f"{tmp_path / name}.*remove it"):
        open_money(load_settings({"server.data_dir": tmp_path}).settings)
    assert before == len(list(Path("/proc/self/fd").iterdir()))
    assert held == (tmp_path / name).read_bytes()


def test_a_charge_of_nothing_is_observed_like_any_other(tmp_path):
    """And before the first charge, each class is there with nothing."""
    seen = []
    with money_of(tmp_path) as money:
        money.start(lambda *bill: seen.append(bill))
        ((currency, classes, saved),) = seen
        assert ("CNY", 0, {0}) == (currency, saved, set(classes.values()))
        assert {*HIT_CLASSES, "miss", "output"} == set(classes)
        seen.clear()
        reserved(money.books.ledger, "nothing", Usage())
        reserved(money.books.ledger, "one", Usage(miss=1))
        money.books.ledger.close()
        assert 2 == money.stats().ledger.settled
    assert [0, 1_000_000] == [sum(by_class.values()) for _, by_class, _ in seen]


def reserved(ledger, name, usage):
    pinned = ledger.book.at("m", 10**18 * 2, "CNY")
    hold = ledger.reserve("default", name, 0, pinned).result()
    ledger.settle(hold, usage, Outcome.FINISHED).result()


def test_heads_are_kept(tmp_path):
    kept = tmp_path / "heads.jsonl"
    with money_of(tmp_path, billing__heads_to=str(kept)) as money:
        money.start(lambda *_: None)
        money.keep_heads()
    (line,) = kept.read_text().splitlines()
    assert "admin trail" in json.loads(line)["heads"]


def test_tenants_amounts_are_in_the_snapshot(tmp_path):
    """In the tenant's currency: its balance, what this server charged, this day and this month."""
    with money_of(tmp_path) as money:
        money.start(lambda *_: None)
        ledger = money.books.ledger
        ledger.post(Deposit("default", Kind.TOPUP, "t", UNITS, "ops")).result()
        pinned = ledger.book.at("m", time.time_ns(), "CNY")
        for name in ("r1", "r2"):
            hold = ledger.reserve("default", name, 0, pinned).result()
            ledger.settle(hold, Usage(output=1000), Outcome.FINISHED).result()
        ledger.correct("default", "r2", reference="c", by="ops", reason="").result()
        money.refresh()
        (found,) = money.stats().tenants
    assert ("default", "CNY", 0.998) == found[:3]
    assert (0.004, 0.004, 0.004) == found[3:]
