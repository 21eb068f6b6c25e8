"""Heads of the ledger are kept in a file, at a receiver or in a bucket, and prove from each."""

import sqlite3
from contextlib import closing

import pytest
from typer.testing import CliRunner

from billing.errors import ExportError
from billing.money import UNITS
from billing.proof import audit
from billing.reports.heads import signed_heads
from billing.reports.receipts import ReceiptSigner
from billing.store.opening import open_store
from billing.usage import Usage
from cachesvc.cli import app
from cachesvc.server.kept_heads import keep_heads, read_kept
from tests.contract.test_remote_objects import s3_server
from tests.support.billing import running_ledger
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


@pytest.fixture(params=["file", "receiver", "bucket"])
def place(request, tmp_path):
    if request.param == "file":
        yield str(tmp_path / "heads.jsonl")
    elif request.param == "receiver":
        yield from receiver()
    else:
        pytest.importorskip("obstore")
        yield from s3_server()


def test_a_cut_tail_is_found_with_heads_from_each_place(tmp_path, place):
    path = tmp_path / "ledger.sqlite3"
    signer = ReceiptSigner.open(tmp_path)
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(UNITS)
        for number in range(3):
            house.charge(f"r{number}", Usage(miss=10))
            keep_heads(signed_heads(house.ledger.store, signer, house.clock() + number), place)
    assert 3 == len(read_kept(place).splitlines()) or place.startswith("http")
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
    pytest.importorskip("obstore")
    line = {"at_ns": 1, "key_id": "k" * 16}
    nowhere = "s3://b/p?endpoint=http://127.0.0.1:9&access_key_id=a&secret_access_key=very-secret"
    for wrong in (nowhere, str(tmp_path / "no" / "heads")):
        with pytest.raises(ExportError, match="could not be written") as told:
            keep_heads(line, wrong)
        assert "very-secret" not in str(told.value)
        with pytest.raises(ExportError, match="cannot be read"):
            read_kept(wrong)
