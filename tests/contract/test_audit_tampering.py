"""Every column of every table is changed by hand: `verify` says which row differs, or the docs say
that nothing proves it. Entries and decisions are changed, and every hash is made anew: it says what
is wrong.
"""

import shutil
import sqlite3
from contextlib import closing

import pytest

from billing.budgets import set_budget
from billing.gate.entries import Kind
from billing.gate.limits import SpendLimit
from billing.gate.outcomes import Outcome
from billing.idempotency import Idempotency
from billing.money import UNITS
from billing.prices.cards import parse_card
from billing.proof import audit
from billing.proof.trail import TRAIL
from billing.store.opening import open_store
from tests.contract.forging import copy, forging, rechain
from tests.support.billing import USAGE, card_text, priced, running_ledger

LATER = card_text("later", priced("*", "0.2", "2", "4"), valid_from="2025-01-01T00:00:30Z")
UNPROVEN_TABLES = {*("meta", "idempotency", "undelivered", "export_cursors")}
UNPROVEN = {"projects.created_ns", "keys.digest"}
UNPROVEN |= {f"holds.{name}" for name in ("request_id", "expires_ns", "owner", "boot")}
CHANGED = {
    "INTEGER": '"{0}" + 9',
    "BIGINT": 'coalesce("{0}", 0) + 9',
    "BOOLEAN": '1 - "{0}"',
    "BLOB": "x'00'",
}


@pytest.fixture(scope="module")
def heads():
    return {}


@pytest.fixture(scope="module")
def original(tmp_path_factory, heads):
    """A ledger with a row in every table that can be proved."""
    folder = tmp_path_factory.mktemp("ledger")
    with running_ledger(f"sqlite:///{folder / 'running'}") as house:
        house.fund(UNITS)
        house.accounts.create_project("acme", "p", by="ops")
        _, key = house.accounts.create_key("acme", by="ops", project="p", expires_ns=2**62)
        house.accounts.revoke_key(key.key_id, by="ops")
        house.accounts.set_credit_limit("acme", 7 * UNITS, by="ops")
        house.accounts.set_rate_limits("acme", {"requests": 9, "miss_tokens": 9}, by="ops")
        house.accounts.set_rate_limits("acme", {"miss_tokens": None}, by="ops")
        limit = SpendLimit(name="b", tenant="acme", amount=UNITS)
        now_ns = house.clock()
        set_budget(house.accounts, limit, by="ops", now_ns=now_ns, reason="test")
        about = {"session": "s", "project": "p", "key_id": key.key_id}
        house.charge("r1", USAGE, **about)
        house.clock.advance(1)
        house.charge("r2", USAGE, **about)
        house.correct("r1", "c", 5)
        lost = house.reserve("lost", 10**9, fingerprint="f")
        house.settle(lost, USAGE, Outcome.CLIENT_GONE, delivered=False)
        Idempotency(house.ledger.store).begin("acme", "k", b"body", "r3")
        house.reserve("open", 10)
        house.deposit(Kind.GRANT, 5, "g", expires_ns=2**62)
        house.deposit(Kind.WITHDRAWAL, 7, "w", reason="agreed")
        proof = audit.verify(house.ledger.store)
        assert proof.problems == []
        heads.update(proof.heads)
        original = copy(folder / "running", folder / "original")
    with forging(original, rehashed=False):  # without triggers
        return original


@pytest.fixture(scope="module")
def prove(original):
    """What verify says after somebody wrote a statement into the database."""
    changed = original.with_name("changed")
    shutil.copy(original, changed)
    with (
        closing(open_store(f"sqlite:///{changed}")) as store,
        closing(sqlite3.connect(original)) as untouched,
        closing(sqlite3.connect(changed)) as plain,
    ):

        def prove(statement, heads=(), *, rehashed=False, rebuilt=False):
            """Once hashes and sums are made anew, if whoever it was did so."""
            untouched.backup(plain)
            assert plain.execute(statement).rowcount >= 1, statement
            if rehashed:
                rechain(plain)
            plain.commit()
            if rebuilt:
                audit.rebuild(store)
            return audit.verify(store, heads=heads)

        yield prove


def columns(original):
    with closing(sqlite3.connect(original)) as plain:
        for (table,) in plain.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
            if table not in UNPROVEN_TABLES:
                for _, name, kind, *_ in plain.execute(f"PRAGMA table_info({table})"):
                    yield table, name, kind


def test_a_change_of_any_column_is_named(original, prove):
    unseen = set()
    for table, name, kind in columns(original):
        value = CHANGED.get(kind, "\"{0}\" || '1'").format(name)
        newest = f"rowid = (SELECT max(rowid) FROM {table})"
        where = "kind = 'correction'" if table == "entries" else newest
        proof = prove(f'UPDATE {table} SET "{name}" = {value} WHERE {where}')
        if proof.ok:
            unseen.add(f"{table}.{name}")
        elif table == "entries" and name not in ("tenant", "seq"):
            first = proof.problems[0]
            assert (first.tenant, first.seq) == ("acme", 4), name
    assert unseen == UNPROVEN


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE accounts SET topup = ''",
        "UPDATE holds SET amount = 'many'",
        "UPDATE holds SET body = ''",
        "UPDATE usage_daily SET amount_hi = 'x'",
        "UPDATE rate_cards SET text = 'x'",
        "UPDATE entries SET kind = 'gift' WHERE seq = 2",
        "UPDATE entries SET body = x'ff' WHERE seq = 2",
        "UPDATE trail SET after = 'x' WHERE seq = 3",
        "UPDATE accounts SET credit_limit = NULL",
        "UPDATE keys SET revoked_ns = NULL",
        "DELETE FROM rate_cards",
        "DELETE FROM projects",
        "INSERT INTO projects VALUES ('acme', 'q', 0)",
    ],
)
def test_what_cannot_be_is_a_problem_and_no_failure(prove, statement):
    assert not prove(statement).ok


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("DELETE FROM entries WHERE seq = (SELECT max(seq) FROM entries)", "acme"),
        ("DELETE FROM trail WHERE seq = (SELECT max(seq) FROM trail)", TRAIL),
    ],
)
def test_a_tail_that_was_cut_is_found_by_its_head(prove, heads, statement, named):
    assert named in {problem.tenant for problem in prove(statement, heads).problems}


def test_a_trail_written_anew_is_found_by_its_head(prove, heads):
    last, _ = heads[TRAIL]
    proof = prove("UPDATE trail SET reason = reason", heads | {TRAIL: (last, "00")})
    assert "a recorded head" in proof.problems[0].message


@pytest.mark.parametrize(
    ("seq", "change", "invariant", "said"),
    [
        (1, "postings = 'granted:1000000000000 cash:-1000000000000'", "balanced", "granted"),
        (2, "postings = 'topup:-5 revenue:5'", "rated", "expected"),
        (2, "body = replace(body, '\"output\":7', '\"output\":6')", "rated", "expected"),
        (2, 'body = replace(body, \'"saved":"\', \'"saved":"1\')', "rated", "saved"),
        (2, "kind = 'gift'", "readable", "not a kind"),
        (3, "at_ns = at_ns - 2000000000", "gapless", "before"),
        (3, "currency = 'USD'", "balanced", "USD"),
        (4, "postings = 'granted:5 revenue:-5'", "corrected", "granted"),
        (4, "postings = 'topup:204000001 revenue:-204000001'", "corrected", "more than"),
        (4, "body = replace(body, 'ects\":2', 'ects\":1')", "corrected", "not an earlier charge"),
        (4, "corrects = 3", "corrected", "not an earlier charge"),
        (4, 'body = replace(body, \'"by":"ops"\', \'"by":"system"\')', "corrected", "gives back"),
    ],
)
def test_a_forged_entry_is_named(prove, seq, change, invariant, said):
    first = prove(f"UPDATE entries SET {change} WHERE seq = {seq}", rehashed=True).problems[0]
    assert (first.tenant, first.seq, first.invariant) == ("acme", seq, invariant)
    assert said in first.message


@pytest.mark.parametrize(
    ("seq", "change", "said"),
    [
        (1, "postings = 'topup:2000000000000 cash:-2000000000000'", "its amount differs"),
        (1, 'body = replace(body, \'"by":"test"\', \'"by":"eve"\')', "its actor differs"),
        (1, 'body = replace(body, \'"by":"test"\', \'"by":"system"\')', "its actor differs"),
        (4, "postings = 'topup:6 revenue:-6'", "its amount differs"),
        (7, "postings = 'topup:-8 cash:8'", "its amount differs"),
        (7, "body = replace(body, 'agreed', 'a bribe')", "its reason differs"),
    ],
)
def test_a_forged_deposit_is_not_what_was_decided(prove, seq, change, said):
    statement = f"UPDATE entries SET {change} WHERE seq = {seq}"
    (problem,) = prove(statement, rehashed=True, rebuilt=True).problems
    assert (problem.tenant, problem.seq, problem.invariant) == ("acme", seq, "decided")
    assert said in problem.message


def test_an_entry_that_nobody_decided_and_a_decision_that_nothing_books(prove):
    statement = "UPDATE trail SET subject = 'acme/9' WHERE subject = 'acme/7'"
    said = [str(problem) for problem in prove(statement, rehashed=True, rebuilt=True).problems]
    assert any("it has no decision" in each for each in said)
    assert any("acme/9 was decided, but no entry books it" in each for each in said)


def test_when_a_card_was_applied_is_proved(prove):
    statement = "UPDATE rate_cards SET applied_ns = applied_ns - 1"
    (problem,) = prove(statement, rehashed=True, rebuilt=True).problems
    assert "its applied_ns is" in problem.message


def test_a_charge_by_a_card_that_was_not_in_force_is_named(tmp_path):
    path = tmp_path / "ledger"
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(UNITS)
        house.accounts.apply_card(parse_card(LATER), by="ops")
        house.charge("before", USAGE)
        house.clock.advance(3600)
        house.charge("after", USAGE)
        assert audit.verify(house.ledger.store).problems == []
        old = house.ledger.book.cards[0].at("model", house.clock())
        about = house.reserve("cheap", 0).context
        hold = house.ledger.reserve("acme", "forged", 0, old, context=about).result()
        house.settle(hold, USAGE)
        (problem,) = audit.verify(house.ledger.store).problems
    assert problem.request_id == "forged"
    assert "later 1 was in force when it was admitted" in problem.message
