"""Heads of the ledger are kept in a file or at a receiver, and prove from each."""

import sqlite3
from contextlib import closing

import pytest
from typer.testing import CliRunner

from billing.errors import ExportError
from billing.money import UNITS
from billing.proof import audit
from billing.reports.heads import send_heads, signed_heads
from billing.reports.receipts import ReceiptSigner
from billing.store.opening import open_store
from billing.usage import Usage
from cachesvc.cli import app
from cachesvc.config.errors import ConfigError
from cachesvc.config.sources import load_settings
from tests.support.billing import running_ledger
from tests.support.commands import said
from tests.support.stand_in import Handler, StandIn, served


def receiver():
    kept = []

    class Keeping(Handler):
        def do_POST(self):
            kept.append(self.read_json())
            self.say(204, b"")

        def do_GET(self):
            self.say_json(kept)

    with served(StandIn(Keeping)) as server:
        yield f"{server.url}/heads"


@pytest.fixture(params=["file", "receiver"])
def place(request, tmp_path):
    if request.param == "file":
        yield str(tmp_path / "heads.jsonl")
    else:
        yield from receiver()


def test_a_cut_tail_is_found_with_heads_from_each_place(tmp_path, place):
    path = tmp_path / "ledger.sqlite3"
    signer = ReceiptSigner.open(tmp_path)
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(UNITS)
        for number in range(3):
            house.charge(f"r{number}", Usage(miss=10))
            send_heads(signed_heads(house.ledger.store, signer, house.clock() + number), place)
    verify = ["ledger", "verify", "--heads", place, "--data-dir", str(tmp_path)]
    proved = CliRunner().invoke(app, verify)
    assert 0 == proved.exit_code, proved.output
    with closing(sqlite3.connect(path, isolation_level=None)) as plain:
        plain.execute("DROP TRIGGER entries_no_delete")
        assert 1 == plain.execute("DELETE FROM entries WHERE seq = 4").rowcount
    store = open_store(f"sqlite:///{path}")
    audit.rebuild(store)
    store.close()
    unseen = CliRunner().invoke(app, ["ledger", "verify", "--data-dir", str(tmp_path)])
    assert 0 == unseen.exit_code, unseen.output  # the tail was cut well
    cut = CliRunner().invoke(app, [*verify, "--json"])
    assert 1 == cut.exit_code, cut.output


def test_an_unreachable_place_is_reported(tmp_path):
    for wrong in (str(tmp_path / "no" / "heads"), "http://127.0.0.1:9/heads"):
        with pytest.raises(ExportError, match="could not be written"):
            send_heads({"at_ns": 1}, wrong)
        verify = ["ledger", "verify", "--heads", wrong, "--data-dir", str(tmp_path)]
        open_store(f"sqlite:///{tmp_path}/ledger.sqlite3").close()
        assert "cannot be read" in said(*verify, code=1)
    verify[3] = "s3://bucket/heads"
    assert "heads in a bucket were removed" in said(*verify, code=1)


def test_a_bucket_is_refused_by_name():
    with pytest.raises(ConfigError, match="heads in a bucket were removed: name a file"):
        load_settings({"billing.heads_to": "s3://bucket/ledger"})
