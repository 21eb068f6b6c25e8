"""What each proof can and cannot show: every forgery is made, and docs/billing.md says the same."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from billing.errors import BillingError
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.money import UNITS
from billing.proof import audit
from billing.proof.result import Head
from billing.reports.heads import parse_heads, read_receipt_head, send_heads, signed_heads
from billing.reports.receipts import ReceiptSigner, published_keys, receipt_for
from billing.store.opening import open_store
from billing.usage import Usage
from tests.contract.forging import Sql, change, copy, forging, problems
from tests.support.billing import running_ledger

USAGE = Usage(hit_disk=900, miss=100, output=7)


class House:
    """A ledger with a past, an older copy of it, and what others keep of it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.older, self.invented = (folder / n for n in ("ledger", "older", "invented"))
        self.signer = ReceiptSigner.open(folder)
        self.keys = published_keys(folder)
        self.heads_file, self.receipt_file = folder / "heads.jsonl", folder / "receipt.json"
        with running_ledger(f"sqlite:///{self.path}") as house:
            grant = {"reference": "g", "by": "ops"}
            house.ledger.post(Deposit("acme", Kind.GRANT, amount=7, **grant)).result()
            house.fund(UNITS)
            house.charge("r1", USAGE)
            copy(self.path, self.older)
            house.charge("r2", Usage(miss=100, output=9))
            house.charge("r3", USAGE)
            store = house.ledger.store
            send_heads(signed_heads(store, self.signer, 1), str(self.heads_file))
            receipt = receipt_for(store, house.ledger.book, self.signer, "acme", "r3")
            self.receipt_file.write_text(json.dumps(receipt))
        with running_ledger(f"sqlite:///{self.invented}") as house:
            house.fund(5 * UNITS)
            house.charge("r3", Usage(miss=1))

    def key(self, key_id: str) -> bytes | None:
        return bytes.fromhex(self.keys[key_id]) if key_id in self.keys else None

    def heads(self) -> list[dict[str, Head]]:
        return parse_heads(self.heads_file.read_bytes(), "", self.key)

    def receipt(self) -> list[dict[str, Head]]:
        return [read_receipt_head(self.receipt_file, self.key)]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("ledger"))


def edit(plain: Sql) -> None:
    change(
        plain, "UPDATE entries SET body = replace(body, 'output\":9', 'output\":8') WHERE seq = 4"
    )


def cheaper(plain: Sql) -> None:
    """100 computed and 8 of output, not 9: 116,000,000 units, not 118,000,000."""
    edit(plain)
    change(
        plain, "UPDATE entries SET postings = 'topup:-116000000 revenue:116000000' WHERE seq = 4"
    )


def swap(plain: Sql) -> None:
    for old, new in ((4, -4), (5, 4), (-4, 5)):
        change(plain, f"UPDATE entries SET seq = {new} WHERE seq = {old}")


def cut(plain: Sql) -> None:
    change(plain, "DELETE FROM entries WHERE seq = 5")


LARGER = "UPDATE entries SET postings = 'topup:9000000000000 cash:-9000000000000' WHERE seq = 2"


def top_up(plain: Sql) -> None:
    change(plain, LARGER)


def top_up_and_trail(plain: Sql) -> None:
    change(plain, LARGER)
    after = "UPDATE trail SET after = json_set(after, '$.balance', '9.000000000007')"
    change(plain, f"{after} WHERE action = 'balance.topup'")


FORGERIES: dict[str, Callable[[Sql], None]] = {
    "edits an entry": edit,
    "makes a charge cheaper, with its usage": cheaper,
    "swaps two charges": swap,
    "cuts off the tail": cut,
    "makes a top-up larger": top_up,
    "makes a top-up larger, and its decision in the trail": top_up_and_trail,
}


def forged(house: House, name: str, path: Path) -> None:
    if name not in FORGERIES:
        copy(house.older if "older" in name else house.invented, path)
        return
    is_plain = FORGERIES[name] is edit
    with forging(copy(house.path, path), rehashed=not is_plain) as plain:
        FORGERIES[name](plain)
    problems(path, rebuilt=not is_plain)


def table() -> dict[str, list[str]]:
    """The table of the page, by forgery."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in Path("docs/billing.md").read_text().splitlines()
        if line.startswith("| ") and line.count("found") == 3
    ]
    return {row[0]: row[1:] for row in rows}


def test_an_untouched_ledger_is_proved(house: House) -> None:
    for kept in ((), house.receipt(), house.heads()):
        assert [] == problems(house.path, heads=kept)


@pytest.mark.parametrize("name", table())
def test_a_proof_shows_what_the_table_says(house: House, tmp_path: Path, name: str) -> None:
    forged(house, name, tmp_path / "forged")
    said = [
        "found" if problems(tmp_path / "forged", heads=kept) else "not found"
        for kept in ((), house.receipt(), house.heads())
    ]
    assert table()[name] == said


def test_the_table_names_every_forgery() -> None:
    assert FORGERIES.keys() <= table().keys()
    assert len(table()) == len(FORGERIES) + 2


def test_every_line_of_kept_heads_counts(house: House, tmp_path: Path) -> None:
    """The forger exports heads of the forgery, too: the line from before it tells."""
    path, kept = tmp_path / "forged", tmp_path / "heads.jsonl"
    kept.write_bytes(house.heads_file.read_bytes())
    forged(house, "makes a charge cheaper, with its usage", path)
    with closing(open_store(f"sqlite:///{path}")) as store:
        send_heads(signed_heads(store, house.signer, 2), str(kept))
        assert not audit.verify(store, heads=parse_heads(kept.read_bytes(), "", house.key)).ok
        assert audit.verify(store, heads=parse_heads(kept.read_bytes(), "", house.key)[1:]).ok


def test_changed_heads_and_heads_of_another_key_are_refused(house: House, tmp_path: Path) -> None:
    kept = tmp_path / "heads.jsonl"
    kept.write_bytes(house.heads_file.read_bytes().replace(b'"entry":5', b'"entry":4'))
    with pytest.raises(BillingError, match="a line was changed"):
        parse_heads(kept.read_bytes(), "", house.key)
    kept.write_text(house.receipt_file.read_text())
    with pytest.raises(BillingError, match="another key signed it"):
        parse_heads(kept.read_bytes(), "", house.key)
