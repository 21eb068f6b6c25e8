"""What every ledger database must do: the same suite on SQLite and on PostgreSQL."""

import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from billing import errors
from billing.accounts import Accounts
from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome
from billing.money import UNITS
from billing.proof import audit
from billing.reports import usage as usage_report
from billing.reports.revenue import revenue
from billing.store.opening import open_store
from billing.store.prepared import HotStatements
from billing.store.store import LedgerStore
from billing.usage import EMPTY, Usage
from tests.support.billing import PRICE, USAGE, ManualClock, entries_of, running_ledger


def test_a_request_is_settled_once_however_often_it_is_said(house):
    house.fund(UNITS)
    hold = house.reserve("r1", UNITS // 2)
    first = house.settle(hold, USAGE)
    again = house.settle(hold, Usage(miss=10**6))
    assert (again.repeated, again.entry, again.charge) == (True, first.entry, first.charge)
    with pytest.raises(errors.DuplicateRequest):
        house.reserve("r1", 1)
    assert [entry.kind for entry in entries_of(house.ledger.store)] == [Kind.TOPUP, Kind.CHARGE]


def test_the_gate_refuses_what_the_balance_does_not_cover(house):
    house.fund(100)
    first = house.reserve("r1", 60)
    with pytest.raises(errors.InsufficientBalance, match="top up"):
        house.reserve("r2", 41)
    assert house.ledger.top_up(first, 40).result() == 100
    with pytest.raises(errors.InsufficientBalance):
        house.ledger.top_up(first, 1).result()
    house.ledger.void(first).result()
    assert house.reserve("r3", 100).request_id == "r3"
    with pytest.raises(errors.UnknownHold):
        house.ledger.top_up(first, 1).result()


def test_unknown_and_suspended_tenants_and_other_currencies_are_refused(house):
    house.fund(100)
    with pytest.raises(errors.UnknownTenant):
        house.reserve("r1", 1, tenant="nobody")
    house.accounts.create_tenant("yankee", "USD", by="test")
    with pytest.raises(errors.CurrencyMismatch, match="pays in USD"):
        house.reserve("r1", 0, tenant="yankee")
    house.accounts.set_suspended("acme", True, by="test")
    with pytest.raises(errors.TenantSuspended):
        house.reserve("r1", 1)


def test_one_refusal_leaves_the_rest_of_its_batch_alone(house):
    house.fund(100)
    pinned = house.ledger.book.at("model", house.clock(), "CNY")
    futures = [house.ledger.reserve("acme", f"r{i}", 30, pinned) for i in range(5)]
    raised = [future.exception() for future in futures]
    assert [type(error) for error in raised] == [type(None)] * 3 + [errors.InsufficientBalance] * 2


@pytest.mark.parametrize("by_admin", [False, True])
def test_a_late_word_that_bills_less_gives_back_what_no_admin_has(house, by_admin):
    house.fund(UNITS)
    hold = house.reserve("r1", UNITS // 2)
    house.lapse(hold, USAGE)
    if by_admin:
        house.correct("r1", "c")
    house.settle(hold, EMPTY, Outcome.FAILED)
    assert house.account().topup == UNITS


def test_another_servers_holds_are_left_alone_until_their_lease_ends(url):
    clock = ManualClock()
    with running_ledger(url, owner="one", clock=clock) as one:
        one.fund(UNITS)
        one.reserve("r1", 5, ttl_s=60)
        with running_ledger(url, owner="two", clock=clock) as two:
            assert two.account().held == 5
            assert two.ledger.sweeper.sweep() == 0
            clock.advance(60)
            assert one.ledger.sweeper.sweep() == 0, "its own lease is timed, not dated"
            assert two.ledger.sweeper.sweep() == 1
            assert two.account().held == 0


def test_a_correction_gives_back_no_more_than_is_left_of_its_charge(house):
    house.fund(UNITS)
    house.charge("r1", USAGE)
    for _ in range(2):  # said again, it is the same
        assert house.correct("r1", "c1", 4_000_000).amount == 4_000_000
    for other in (9, None):
        with pytest.raises(errors.AlreadyExists, match="another correction"):
            house.correct("r1", "c1", other)
    with pytest.raises(errors.InvalidAmount, match="left of its charge"):
        house.correct("r1", "c2", PRICE - 4_000_000 + 1)
    assert house.correct("r1", "c3").amount == PRICE - 4_000_000
    with pytest.raises(errors.InvalidAmount, match="given back completely"):
        house.correct("r1", "c4")
    assert house.account().topup == UNITS


def test_amounts_beyond_64_bits_stay_exact(house):
    huge = 10**30 + 7
    house.fund(huge)
    house.charge("r1", Usage(miss=10**15, output=1))
    assert house.account().topup == huge - 10**21 - 2_000_000
    assert usage_report.total(house.ledger.store, "acme")[0].amount == 10**21 + 2_000_000


OTHERS = "kind, request_id, at_ns, currency, postings, body, hash"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE entries SET body = ''", "append-only"),
        ("DELETE FROM entries", "append-only"),
        (
            f"INSERT INTO entries (tenant, seq, {OTHERS}) SELECT tenant, 9, {OTHERS} FROM entries",
            "(?i)unique",
        ),
    ],
)
def test_the_database_refuses_to_change_an_entry_and_to_repeat_one(house, statement, said):
    house.fund(1)
    with pytest.raises(DBAPIError, match=said), house.ledger.store.writing() as connection:
        connection.execute(text(statement))


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE accounts SET topup = 5 WHERE tenant = 'acme'",
        "UPDATE accounts SET held = 1 WHERE tenant = 'acme'",
        "UPDATE usage_daily SET output = output + 1",
        "DELETE FROM usage_daily",
    ],
)
def test_verify_finds_a_wrong_projection_and_rebuild_mends_it(url, change):
    with running_ledger(url) as house:
        house.fund(UNITS)
        house.charge("r1", USAGE, session="s")
        tamper(house.ledger.store, change)
        proof = audit.verify(house.ledger.store)
        assert [problem.invariant for problem in proof.problems] == ["projected"]
        assert audit.rebuild(house.ledger.store).ok
        assert house.account().topup == UNITS - PRICE


def tamper(store: LedgerStore, statement: str) -> None:
    """Do what the database refuses, as an attacker with its password would."""
    with store.writing() as connection:
        if store.engine.dialect.name == "postgresql":
            connection.execute(text("ALTER TABLE entries DISABLE TRIGGER ALL"))
        else:
            connection.execute(text("DROP TRIGGER entries_no_update"))
        connection.exec_driver_sql(statement)


def test_keys_work_at_once_and_end_when_revoked_elsewhere(house):
    other = Accounts(house.ledger.store)
    assert not house.accounts.requires_keys
    key, info = other.create_key("acme", by="test", name="laptop")
    house.accounts.refresh()
    principal = house.accounts.authenticate(key)
    assert (principal.tenant, principal.key_id, principal.currency) == ("acme", info.key_id, "CNY")
    assert house.accounts.requires_keys
    assert house.accounts.is_live(info.key_id)
    other.revoke_key(info.prefix, by="test", reason="lost")
    house.accounts.refresh()
    with pytest.raises(errors.KeyRevoked):
        house.accounts.authenticate(key)
    assert not house.accounts.is_live(info.key_id)
    with pytest.raises(errors.UnknownKey):
        house.accounts.authenticate("sk-guess")
    newest = house.accounts.trail.newest(1)[0]
    assert (newest["action"], newest["actor"], newest["reason"]) == ("key.revoke", "test", "lost")


def test_the_trail_is_searched_and_paged(house):
    accounts = house.accounts
    for number in range(5):
        accounts.set_suspended(
            "acme", bool(number % 2), by=f"admin{number % 2}", reason=f"no {number}"
        )
    assert ["no 4", "no 3"] == [row["reason"] for row in accounts.trail.newest(2)]
    third = accounts.trail.newest(2)[-1]["seq"]
    assert ["no 2", "no 1"] == [row["reason"] for row in accounts.trail.newest(2, before=third)]
    assert ["no 3", "no 1"] == [row["reason"] for row in accounts.trail.newest(actor="admin1")]
    assert ["no 3"] == [row["reason"] for row in accounts.trail.newest(text="o 3")]
    assert [] == accounts.trail.newest(text="%"), "a wildcard is searched for as it is"
    assert 5 == len(accounts.trail.newest(action="tenant.suspend", text="acme"))
    assert {"tenant.create", "tenant.suspend"} <= set(accounts.trail.actions())


def test_revenue_by_day_and_class_sums_to_what_was_charged(house):
    house.fund(UNITS)
    house.charge("r1", USAGE)
    house.clock.advance(86_400)
    house.charge("r2", USAGE)
    today = datetime.fromtimestamp(house.clock() / 1e9, UTC).date()
    first = today - timedelta(days=3659)
    days, (sums,) = revenue(house.ledger.store, house.accounts.book, first, today)
    assert (2 * PRICE, 2) == (sums.amount, sums.requests)
    charged = [day for day in days if day.requests]
    assert [(PRICE, 1), (PRICE, 1)] == [(day.charged, day.requests) for day in charged]
    assert all(sum(day.amounts.values()) == day.charged for day in days)
    assert 3660 == len(days) and sorted(days, key=lambda day: day.day) == days


@pytest.mark.parametrize("size", [1, 2, 512])
def test_no_lookup_of_the_hot_path_walks_through_a_tenant(tmp_path, size):
    store = open_store(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    hot = HotStatements("sqlite")
    finders = {"accounts": hot.find_accounts, "holds": hot.find_holds, "entries": hot.find_entries}
    with store.reading() as connection:
        for table, finder in finders.items():
            prepared = finder.prepared(size)
            explain = f"EXPLAIN QUERY PLAN {prepared.sql}"
            plan = connection.exec_driver_sql(explain, tuple("x" for _ in prepared.names))
            steps = " ".join(row[-1] for row in plan)
            wanted = "tenant=?" if table == "accounts" else "tenant=? AND request_id=?"
            assert f"SEARCH {table} USING" in steps
            assert f"({wanted})" in steps
    store.close()


def test_a_connection_keeps_few_of_the_pages_that_it_read(tmp_path):
    """With 64 MiB each, a server's memory grew with its ledger by 0.6 KB a request."""
    store = open_store(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    kept = []
    for opened in (store.reading(), store.writing(), store._batch(durable=True)):
        with opened as connection:  # negative: KiB
            kept.append(connection.execute(text("PRAGMA cache_size")).scalar_one())
    store.close()
    assert [-4 << 10, -4 << 10, -16 << 10] == kept


@pytest.mark.parametrize("bad", ["nonsense", "mysql://x/y", "sqlite://", "sqlite:////proc/no/x"])
def test_a_database_that_cannot_be_says_so(bad):
    with pytest.raises((errors.StoreError, OSError)):
        open_store(bad)


def test_a_ledger_in_a_folder_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    """As on a snapshot that is mounted read-only; SQLite says `unable to open database file`."""
    (tmp_path / "ledger.sqlite3-wal").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    said = f"also to read it, and {tmp_path} cannot be written"
    with pytest.raises(errors.StoreError, match=said):
        open_store(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")


@pytest.mark.parametrize("left", [0, 4096])
def test_a_ledger_that_lost_its_contents_is_not_recreated(tmp_path, left):
    """Its first page alone is there if its log was removed, and the server killed."""
    file = tmp_path / "ledger.sqlite3"
    file.touch()  # of a first start that was killed at once
    store = open_store(f"sqlite:///{file}")
    store.claim("server")
    store.close()
    for side in tmp_path.glob("ledger.sqlite3-[sw]?[lm]"):
        side.unlink()
    file.write_bytes(b"")
    if left:
        with closing(sqlite3.connect(file)) as empty:
            empty.execute("PRAGMA journal_mode=WAL")
    assert left == file.stat().st_size
    for _ in range(2):
        with pytest.raises(errors.StoreError, match=r"is empty, though .* Restore it from a copy"):
            open_store(f"sqlite:///{file}")
    file.unlink()
    open_store(f"sqlite:///{file}").close()
