"""What each proof can and cannot show: every forgery is made, and docs/billing.md says the same.

Of the second table each is made with every hash and sum to match.
"""

import json
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from billing.errors import BillingError
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.gate.holds import Hold, RequestContext
from billing.money import UNITS
from billing.prices.book import NS, Terms
from billing.prices.cards import parse_card
from billing.proof import audit
from billing.proof.result import Head
from billing.reports.heads import parse_heads, read_receipt_head, send_heads, signed_heads
from billing.reports.receipts import ReceiptSigner, published_keys, receipt_for
from billing.store.opening import open_store
from billing.usage import Usage
from tests.contract.forging import Sql, change, copy, forging, problems
from tests.support.billing import USAGE, TestLedger, card_text, priced, running_ledger


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
def house(tmp_path_factory):
    return House(tmp_path_factory.mktemp("ledger"))


def body(seq, old, new):
    """Puts `new` in the place of `old` in an entry's body."""
    assert old != new
    return (
        f"UPDATE entries SET body = replace(body, '{old}', '{new}') "
        f"WHERE seq = {seq} AND instr(body, '{old}') > 0"
    )


def postings(seq, text):
    return f"UPDATE entries SET postings = '{text}' WHERE seq = {seq}"


def forge(path, how, **options):
    """By statements, each of which changes one row, or by functions."""
    with forging(path, **options) as plain:
        for step in how:
            step(plain) if callable(step) else change(plain, step)


EDIT = body(4, 'output":9', 'output":8')
LARGER = postings(2, "topup:9000000000000 cash:-9000000000000")
DECIDED = (
    "UPDATE trail SET after = json_set(after, '$.balance', '9.000000000007') "
    "WHERE action = 'balance.topup'"
)
CHEAPER = postings(4, "topup:-116000000 revenue:116000000")
FORGERIES = {
    "edits an entry": [EDIT],
    # 100 computed and 8 of output, not 9: 116,000,000 units, not 118,000,000.
    "makes a charge cheaper, with its usage": [EDIT, CHEAPER],
    "swaps two charges": [
        f"UPDATE entries SET seq = {new} WHERE seq = {old}"
        for old, new in ((4, -4), (5, 4), (-4, 5))
    ],
    "cuts off the tail": ["DELETE FROM entries WHERE seq = 5"],
    "makes a top-up larger": [LARGER],
    "makes a top-up larger, and its decision in the trail": [LARGER, DECIDED],
}


def forged(house: House, name: str, path: Path) -> None:
    if name not in FORGERIES:
        copy(house.older if "older" in name else house.invented, path)
        return
    is_plain = FORGERIES[name] == [EDIT]
    forge(copy(house.path, path), FORGERIES[name], rehashed=not is_plain)
    problems(path, rebuilt=not is_plain)


def table() -> dict[str, list[str]]:
    """The table of the page, by forgery."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in Path("docs/billing.md").read_text().splitlines()
        if line.startswith("| ") and line.count("found") == 3
    ]
    return {row[0]: row[1:] for row in rows}


def test_an_untouched_ledger_is_proved(house):
    for kept in ((), house.receipt(), house.heads()):
        assert [] == problems(house.path, heads=kept)


@pytest.mark.parametrize("name", table())
def test_a_proof_shows_what_the_table_says(house, tmp_path, name):
    forged(house, name, tmp_path / "forged")
    said = [
        "found" if problems(tmp_path / "forged", heads=kept) else "not found"
        for kept in ((), house.receipt(), house.heads())
    ]
    assert table()[name] == said


def test_the_table_names_every_forgery():
    assert FORGERIES.keys() <= table().keys()
    assert len(table()) == len(FORGERIES) + 2


def test_every_line_of_kept_heads_counts(house, tmp_path):
    """The forger exports heads of the forgery, too: the line from before it tells."""
    path, kept = tmp_path / "forged", tmp_path / "heads.jsonl"
    kept.write_bytes(house.heads_file.read_bytes())
    forged(house, "makes a charge cheaper, with its usage", path)
    with closing(open_store(f"sqlite:///{path}")) as store:
        send_heads(signed_heads(store, house.signer, 2), str(kept))
        assert not audit.verify(store, heads=parse_heads(kept.read_bytes(), "", house.key)).ok
        assert audit.verify(store, heads=parse_heads(kept.read_bytes(), "", house.key)[1:]).ok


def test_changed_heads_and_heads_of_another_key_are_refused(house, tmp_path):
    kept = tmp_path / "heads.jsonl"
    kept.write_bytes(house.heads_file.read_bytes().replace(b'"entry":5', b'"entry":4'))
    with pytest.raises(BillingError, match="a line was changed"):
        parse_heads(kept.read_bytes(), "", house.key)
    kept.write_text(house.receipt_file.read_text())
    with pytest.raises(BillingError, match="another key signed it"):
        parse_heads(kept.read_bytes(), "", house.key)


DAY = 86_400
BY = {"by": "eve", "reason": "test"}
CARD = card_text(
    "pins", priced("*", "0.1", "1", "100", storage_minute="0.5"), factors={"flex": "0.5"}
)


def charge(house: TestLedger, name: str, usage: Usage) -> None:
    house.settle(hold(house, name), usage)


def hold(house: TestLedger, name: str, amount: int = 0) -> Hold:
    pinned = house.ledger.book.at("small", house.clock(), "CNY", Terms(tenant="acme"))
    context = RequestContext(admitted_ns=house.clock())
    return house.ledger.reserve("acme", name, amount, pinned, context=context).result()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Entries 1: a top-up, 2 to 5: charges of January (4: a pin), 6: a correction of 5, 7 and 8:
    charges of February, 9: a grant that ends."""
    path = tmp_path_factory.mktemp("ledger") / "original"
    with running_ledger(f"sqlite:///{path}") as house:
        house.accounts.apply_card(parse_card(CARD), by="ops")
        house.fund(1000 * UNITS)
        ledger = house.ledger
        charge(house, "r1", Usage(miss=600))
        charge(house, "r2", Usage(output=12))
        charge(house, "pin", Usage(storage_token_minutes=1000))
        charge(house, "r3", Usage(miss=1_000_400))
        house.clock.advance(40 * DAY)
        ledger.correct("acme", "r3", reference="back", **BY).result()
        charge(house, "r4", Usage(miss=1_000_000))
        house.clock.advance(3600)
        charge(house, "r5", Usage(miss=1_000_000))
        ends_ns = house.clock() + 30 * DAY * NS
        house.deposit(Kind.GRANT, 5 * UNITS, "g", expires_ns=ends_ns)
        hold(house, "open", 10**9)
        assert audit.verify(ledger.store).problems == []
    return path


def append(plain: Sql, kind: str, name: str, postings: str, body: str, corrects: str) -> None:
    """One more entry, at the instant of the last."""
    said = (
        f"'acme', 10, '{kind}', '{name}', at_ns, currency, '{postings}', {body}, hash, {corrects}"
    )
    change(plain, f"INSERT INTO entries SELECT {said}, billed_ns FROM entries WHERE seq = 9")


def give_back(plain: Sql, reference: str) -> None:
    """All of entry 8, which cost 1.00."""
    body = '{"by":"system","corrects":8,"reason":"why"}'
    append(plain, "correction", reference, UNPAID, f"'{body}'", "8")


UNPAID = "topup:1000000000000 revenue:-1000000000000"


def charge_again(plain: Sql, name: str = "r5") -> None:
    if name == "r5":
        plain.execute("DROP INDEX entries_once")
    body = "(SELECT body FROM entries WHERE seq = 8)"
    append(plain, "charge", name, "granted:-1000000000000 revenue:1000000000000", body, "NULL")
    change(plain, "UPDATE entries SET billed_ns = (SELECT billed_ns FROM entries WHERE seq = 8) "
                  "WHERE seq = 10")  # fmt: skip


# What finds it, and how it is done.
ENTRY_FORGERIES = {
    "dates a charge back to before its card": (
        "rated",
        "UPDATE entries SET billed_ns = at_ns - 86400000000000 WHERE seq = 2",
        "UPDATE entries SET body = json_set(body, '$.admitted_ns', billed_ns) WHERE seq = 2",
        "UPDATE entries SET body = json_set(body, '$.billed_ns', billed_ns) WHERE seq = 2",
    ),
    "bills a charge at another moment than its admission": (
        "billed",
        "UPDATE entries SET billed_ns = at_ns - 1 WHERE seq = 2",
        "UPDATE entries SET body = json_set(body, '$.billed_ns', billed_ns) WHERE seq = 2",
    ),
    "counts fewer minutes of a pin, with its price": (
        None,
        body(4, '"storage_token_minutes":1000', '"storage_token_minutes":10'),
        body(4, '"saved":"-500000000"', '"saved":"-5000000"'),
        postings(4, "topup:-5000000 revenue:5000000"),
    ),
    "gives a charge back as the server does if its retry was answered": (
        *("corrected", partial(give_back, reference="retry:r5")),
    ),
    "gives a charge back under another request's id": (
        *("corrected", partial(give_back, reference="failed:r4")),
    ),
    "gives a charge back as the server does if it could not send the answer": (
        *(None, partial(give_back, reference="failed:r5")),
    ),
    "appends a charge under an id that exists": ("once", charge_again),
    "appends a copy of a charge under a new id": (None, partial(charge_again, name="r6")),
    "takes the price of a service tier that the request did not ask for": (
        None,
        body(8, '"window":"standard"', '"window":"standard | flex"'),
        postings(8, "topup:-500000000000 revenue:500000000000"),
    ),
    "moves the end of a grant": (
        "decided",
        "UPDATE entries SET body = json_set(body, '$.expires_ns', 1 << 62) WHERE seq = 9",
    ),
    "renames the reference of a payment": (
        *("decided", "UPDATE entries SET request_id = 'other' WHERE seq = 1"),
    ),
    "takes the price of a pin by the minute for one by the hour": (
        *("rated", body(4, "storage_token_minutes", "storage_token_hours")),
    ),
    "removes the hold of a request that runs": (
        None,
        "DELETE FROM holds WHERE request_id = 'open'",
        "UPDATE accounts SET held = '0' WHERE tenant = 'acme'",
    ),
}
OF_SUMS = "removes the hold of a request that runs"  # they are forged, and so not made anew


def entry_table() -> dict[str, str]:
    """The second entry_table of the page: forgery, and what `verify` says."""
    page = Path("docs/billing.md").read_text()
    rows = page.partition("| of charges, deposits")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: row[1] for row in cells}


@pytest.mark.parametrize("name", ENTRY_FORGERIES)
def test_a_proof_finds_what_the_table_says(original, tmp_path, name):
    (invariant, *how), path = ENTRY_FORGERIES[name], tmp_path / "forged"
    forge(copy(original, path), how)
    try:
        found = problems(path, rebuilt=name != OF_SUMS)
    except BillingError:
        found = problems(path)  # the entries themselves do not prove
    assert invariant == (found[0].invariant if found else None), found
    assert entry_table()[name] == ("not found" if invariant is None else "found")


def test_the_second_table_names_every_forgery():
    assert entry_table().keys() == ENTRY_FORGERIES.keys()
