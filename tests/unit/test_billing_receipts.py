"""Receipts and plans of a small ledger, and the secrets of the data directory: one for all who ask
at once, whole or not there."""

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from unittest.mock import Mock

import orjson
import pytest

from billing.errors import BillingError
from billing.money import parse_amount
from billing.prices.cards import find_card, parse_card
from billing.proof import rerate as plan
from billing.reports import receipts
from billing.reports.receipts import KEY_FILE, ReceiptSigner, receipt_for, verify_receipt
from billing.secret_file import read_or_make
from billing.usage import Usage
from tests.support.commands import said

USAGE = Usage(hit_device=100, hit_disk=900, miss=100, output=7)


@pytest.fixture
def house(house):
    house.charge("r1", USAGE, project="web")
    return house


def test_a_receipt_is_proved_by_the_public_key_alone(house, tmp_path):
    """No field at any depth can be changed, left out or added."""
    signer, asked = ReceiptSigner.open(tmp_path), (house.ledger.store, house.ledger.book)
    receipt = receipt_for(*asked, signer, "acme", "r1")
    assert verify_receipt(orjson.loads(orjson.dumps(receipt)), signer.public_key)
    lines = receipt["lines"]
    assert receipt["amount"] == "0.000214"
    assert parse_amount("0.000214") == sum(parse_amount(line["amount"]) for line in lines)
    forged = [{k: v for k, v in receipt.items() if k != name} for name in receipt]
    forged += [receipt | {name: "0"} for name in (*receipt, "note")]
    forged += [receipt | {"lines": lines[1:]}]
    for number, line in enumerate(lines):
        for name in line:
            changed = [*lines[:number], line | {name: 1}, *lines[number + 1 :]]
            forged.append(receipt | {"lines": changed})
    assert [] == [each for each in forged if verify_receipt(each, signer.public_key)]
    (tmp_path / "other").mkdir()
    for key in (ReceiptSigner.open(tmp_path / "other").public_key, signer.public_key[:31]):
        assert not verify_receipt(receipt, key)
    with pytest.raises(BillingError, match="r9"):
        receipt_for(*asked, signer, "acme", "r9")


def test_a_new_key_leaves_earlier_receipts_provable(house, tmp_path):
    """To change keys, the private one is removed: every public key stays published."""
    store, book = house.ledger.store, house.ledger.book
    old = ReceiptSigner.open(tmp_path)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    receipt = receipt_for(store, book, old, "acme", "r1")
    (tmp_path / KEY_FILE).unlink()
    new = ReceiptSigner.open(tmp_path)
    keys = receipts.published_keys(tmp_path)
    assert [old.key_id, new.key_id] == list(keys)
    assert verify_receipt(receipt, bytes.fromhex(keys[receipt["key_id"]]))
    assert not verify_receipt(receipt, new.public_key)
    again = receipt_for(store, book, ReceiptSigner.open(tmp_path), "acme", "r1")
    assert new.key_id == again["key_id"]
    assert 2 == len(receipts.published_keys(tmp_path))


def test_a_customer_checks_a_receipt_as_the_docs_say(house, tmp_path):
    """The snippet of docs/billing.md, with nothing of ours."""
    page = Path("docs/billing.md").read_text()
    snippet = page.partition("## Receipts")[2].partition("```python\n")[2].partition("```")[0]
    signer = ReceiptSigner.open(tmp_path)
    receipt = receipt_for(house.ledger.store, house.ledger.book, signer, "acme", "r1")
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))
    given = [str(tmp_path / "receipt.json"), signer.public_key.hex()]
    for changed, code in ((receipt, 0), (receipt | {"amount": "0.0"}, 1)):
        (tmp_path / "receipt.json").write_text(json.dumps(changed))
        ran = subprocess.run([sys.executable, "-c", snippet, *given], capture_output=True)
        assert (code, b"InvalidSignature" in ran.stderr) == (ran.returncode, bool(code))


def test_receipts_are_checked_from_the_command_line(house, tmp_path):
    def usage(*words, **how):
        return said("usage", *words, "--data-dir", tmp_path, **how)

    assert "no receipt was signed yet" in usage("receipt", "--public-keys")
    file = tmp_path / "r1.json"
    file.write_text(usage("receipt", "acme", "r1"))
    (key,) = json.loads(usage("receipt", "--public-keys", "--json"))
    assert "genuine: entry 2 of tenant acme" in usage("receipt", "--check", str(file))
    usage("receipt", "--check", str(file), "--public-key", key["public_key"])
    file.write_text(file.read_text().replace("0.000214", "0.000213"))
    assert "NOT genuine" in usage("receipt", "--check", str(file), code=1)
    assert "hexadecimal" in usage("receipt", "--check", str(file), "--public-key", "x", code=2)
    file.write_text('{"key_id": "00"}')
    assert "never signed here" in usage("receipt", "--check", str(file), code=1)
    file.write_text("no")
    assert "is not a receipt" in usage("receipt", "--check", str(file), code=1)


def test_a_plan_rates_real_usage_under_another_card(house):
    found = plan.rerate(house.ledger.store, plan.under_card(find_card("peak-off-peak")))
    assert found.differing == ["acme/r1"]
    row = found.rows[0]
    # admitted on 2025-01-01 at 08:00 in Shanghai, in the window `off_peak`
    assert (row.charged, row.planned) == (214_000_000, 1000 * 250_000 + 10**8 + 7 * 4_000_000)
    own = plan.rerate(house.ledger.store, house.ledger.book.at)
    assert (own.num_differing, own.rows[0].change) == (0, 0)


def test_a_plan_says_what_has_no_price_and_leaves_other_currencies(house):
    nothing = plan.rerate(house.ledger.store, plan.under_card(find_card("two-tier")))
    assert ([], [], 1) == (nothing.rows, nothing.unpriced, nothing.num_other_currency)
    other = parse_card(find_card("deepseek-launch").text.replace('match = "*"', 'match = "big*"'))
    found = plan.rerate(house.ledger.store, plan.under_card(other))
    assert [("model", 214_000_000)] == [(row.model, row.charged) for row in found.unpriced]
    assert ([], 0) == (found.rows, found.num_differing)


def test_all_who_make_one_at_once_have_the_same(tmp_path):
    together = Barrier(4)

    def make(number: int) -> bytes:
        def fresh() -> bytes:
            together.wait()  # all have seen that there is none
            return bytes([number])

        return read_or_make(tmp_path / "secret", fresh)

    with ThreadPoolExecutor(4) as threads:
        assert 1 == len(set(threads.map(make, range(4))))
    assert [tmp_path / "secret"] == list(tmp_path.iterdir())
    assert 0o600 == stat.S_IMODE((tmp_path / "secret").stat().st_mode)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        read_or_make(tmp_path / "secret", lambda: b"x")
    assert [] == list(tmp_path.iterdir())
