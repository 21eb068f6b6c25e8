"""Somebody changes an entry and makes every hash anew: `verify` still says what is wrong."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from billing.money import UNITS
from billing.proof import audit
from billing.store.opening import open_store
from billing.usage import Usage
from tests.contract.forging import forging
from tests.support.billing import running_ledger

USAGE = Usage(hit_disk=900, miss=100, output=7)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Entries 1: a top-up, 2 and 3: charges, 4: a correction of 2."""
    path = tmp_path_factory.mktemp("ledger") / "original"
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(UNITS)
        house.charge("r1", USAGE)
        house.clock.advance(1)
        house.charge("r2", USAGE)
        house.correct("r1", "c", 5)
    return path


def forge(path: Path, seq: int, change: str) -> None:
    """Change one entry and write the chain anew behind it, up to the account's head."""
    with forging(path) as plain:
        assert plain.execute(f"UPDATE entries SET {change} WHERE seq = {seq}").rowcount == 1


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
        (
            4,
            "body = replace(body, '\"corrects\":2', '\"corrects\":1')",
            "corrected",
            "not an earlier charge",
        ),
        (4, "corrects = 3", "corrected", "not an earlier charge"),
    ],
)
def test_a_forged_entry_is_named(
    original: Path, tmp_path: Path, seq: int, change: str, invariant: str, said: str
) -> None:
    forged = tmp_path / "forged"
    with (
        closing(sqlite3.connect(original)) as source,
        closing(sqlite3.connect(forged)) as copy,
    ):
        source.backup(copy)
    forge(forged, seq, change)
    with closing(open_store(f"sqlite:///{forged}")) as store:
        first = audit.verify(store).problems[0]
    assert (first.tenant, first.seq, first.invariant) == ("acme", seq, invariant)
    assert said in first.message
