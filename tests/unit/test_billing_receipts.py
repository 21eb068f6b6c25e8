"""Receipts and plans of a small ledger."""

import stat
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from billing import plan
from billing.cards import find_card, parse_card
from billing.errors import BillingError
from billing.money import UNITS, parse_amount
from billing.receipts import KEY_FILE, ReceiptSigner, receipt_for, verify_receipt
from billing.testing import TestLedger, running_ledger
from billing.usage import Usage

USAGE = Usage(hit_device=100, hit_disk=900, miss=100, output=7)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[TestLedger]:
    with running_ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}") as house:
        house.fund(UNITS)
        house.charge("r1", USAGE, project="web")
        yield house


def test_a_receipt_is_proved_by_the_public_key_alone(house: TestLedger, tmp_path: Path) -> None:
    signer = ReceiptSigner.open(tmp_path)
    receipt = receipt_for(house.ledger.store, house.ledger.book, signer, "acme", "r1")
    assert verify_receipt(orjson.loads(orjson.dumps(receipt)), signer.public_key)
    assert receipt["amount"] == "0.000214"
    assert parse_amount(receipt["amount"]) == sum(
        parse_amount(line["amount"]) for line in receipt["lines"]
    )
    for name in receipt:
        assert not verify_receipt(receipt | {name: "0"}, signer.public_key), name
    assert not verify_receipt(receipt, ReceiptSigner.open(_other(tmp_path)).public_key)


def _other(tmp_path: Path) -> Path:
    other = tmp_path / "other"
    other.mkdir()
    return other


def test_the_signing_key_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    first = ReceiptSigner.open(tmp_path).public_key
    assert ReceiptSigner.open(tmp_path).public_key == first
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


def test_there_is_no_receipt_of_a_request_that_was_never_settled(
    house: TestLedger, tmp_path: Path
) -> None:
    with pytest.raises(BillingError, match="r9"):
        receipt_for(
            house.ledger.store, house.ledger.book, ReceiptSigner.open(tmp_path), "acme", "r9"
        )


def test_a_plan_rates_real_usage_under_another_card(house: TestLedger) -> None:
    found = plan.rerate(house.ledger.store, plan.under_card(find_card("peak-off-peak")))
    row = found.rows[0]
    # admitted on 2025-01-01 at 08:00 in Shanghai, in the window `off_peak`
    assert (row.charged, row.planned) == (214_000_000, 1000 * 250_000 + 10**8 + 7 * 4_000_000)
    assert found.differing == ["acme/r1"]


def test_rating_history_again_under_its_own_book_changes_nothing(house: TestLedger) -> None:
    found = plan.rerate(house.ledger.store, plan.under_book(house.ledger.book))
    assert (found.num_differing, found.rows[0].change) == (0, 0)


def test_a_plan_says_what_has_no_price_and_leaves_other_currencies(house: TestLedger) -> None:
    nothing = plan.rerate(house.ledger.store, plan.under_card(find_card("two-tier")))
    assert ([], [], 1) == (nothing.rows, nothing.unpriced, nothing.num_other_currency)
    other = parse_card(find_card("deepseek-launch").text.replace('match = "*"', 'match = "big*"'))
    found = plan.rerate(house.ledger.store, plan.under_card(other))
    assert [("model", 214_000_000)] == [(row.model, row.charged) for row in found.unpriced]
    assert ([], 0) == (found.rows, found.num_differing)
