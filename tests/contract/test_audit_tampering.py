"""Every column of every table is changed by hand: `verify` says which row differs, or the docs say
that nothing proves it.
"""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from billing.budgets import set_budget
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.gate.limits import SpendLimit
from billing.gate.outcomes import Outcome
from billing.idempotency import Idempotency
from billing.money import UNITS
from billing.proof import audit
from billing.proof.result import Head, Proof
from billing.proof.trail import TRAIL
from billing.store.opening import open_store
from tests.contract.forging import copy, forging
from tests.support.billing import USAGE, running_ledger

Prove = Callable[..., Proof]
UNPROVEN_TABLES = {*("meta", "idempotency", "undelivered", "export_cursors")}
UNPROVEN = {
    "projects.created_ns",
    "keys.digest",
    "holds.request_id",
    "holds.expires_ns",
    "holds.owner",
    "holds.boot",
}
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
        house.charge("r2", USAGE, **about)
        correct = house.ledger.correct("acme", "r1", reference="c", by="ops", reason="", amount=5)
        correct.result()
        lost = house.reserve("lost", 10**9, fingerprint="f")
        house.settle(lost, USAGE, Outcome.CLIENT_GONE, delivered=False)
        Idempotency(house.ledger.store).begin("acme", "k", b"body", "r3")
        house.reserve("open", 10)
        grant = {"reference": "g", "by": "ops", "expires_ns": 2**62}
        house.ledger.post(Deposit("acme", Kind.GRANT, amount=5, **grant)).result()
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

        def prove(statement: str, heads: dict[str, Head] | tuple[()] = ()) -> Proof:
            untouched.backup(plain)
            assert plain.execute(statement).rowcount >= 1, statement
            plain.commit()
            return audit.verify(store, heads=heads)

        yield prove


def columns(original: Path) -> Iterator[tuple[str, str, str]]:
    with closing(sqlite3.connect(original)) as plain:
        for (table,) in plain.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
            if table not in UNPROVEN_TABLES:
                for _, name, kind, *_ in plain.execute(f"PRAGMA table_info({table})"):
                    yield table, name, kind


def test_a_change_of_any_column_is_named(original, prove):
    unseen = set()
    for table, name, kind in columns(original):
        value = CHANGED.get(kind, "\"{0}\" || '1'").format(name)
        where = (
            "kind = 'correction'"
            if table == "entries"
            else f"rowid = (SELECT max(rowid) FROM {table})"
        )
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
