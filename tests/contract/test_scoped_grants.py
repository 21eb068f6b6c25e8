"""Grants for some prices only: who may spend them, in which order, and that nobody spends twice."""

import random
from typing import Any

import pytest

from billing.errors import AlreadyExists, InsufficientBalance, InvalidName
from billing.gate.commands import Adjust, Command, Correct, Deposit, Reserve, Settle, TopUp
from billing.gate.entries import Entry, Kind
from billing.gate.holds import Hold, RequestContext
from billing.gate.outcomes import Outcome
from billing.gate.work import Settled
from billing.money import UNITS
from billing.prices.book import NS, Terms
from billing.prices.cards import parse_card
from billing.proof import audit
from billing.reports.grants import grant_documents
from billing.usage import Usage
from tests.contract.conftest import entries
from tests.support.billing import START_NS, TestLedger, running_ledger

DAY_NS = 86_400 * NS
CARD = """[card]
name = "shop"
version = "1"
currency = "CNY"
valid_from = 2024-12-31T00:00:00Z
[[service]]
name = "batch"
factor = "0.5"
[[group]]
name = "friends"
tenants = ["bolt"]
factor = "0.5"
[[model]]
match = "*"
hit = "1"
miss = "1"
output = "1"
"""


@pytest.fixture
def shop(house: TestLedger) -> TestLedger:
    house.accounts.apply_card(parse_card(CARD), by="ops")
    return house


def give(
    shop: TestLedger, name: str, amount: int, *scope: str, days: int = 0, tenant: str = "acme"
) -> Entry:
    about = {"reference": name, "by": "eve", "scope": scope}
    expires_ns = START_NS + days * DAY_NS if days else 0
    return shop.ledger.post(
        Deposit(tenant, Kind.GRANT, amount=amount * UNITS, expires_ns=expires_ns, **about)
    ).result()


def hold(
    shop: TestLedger, name: str, model: str, amount: int, service: str = "", tenant: str = "acme"
) -> Hold:
    terms = Terms(tenant=tenant, service=service)
    pinned = shop.ledger.book.at(model, shop.clock(), "CNY", terms)
    return shop.ledger.reserve(tenant, name, amount * UNITS, pinned).result()


def charge(
    shop: TestLedger, name: str, model: str, amount: int, service: str = "", held: int = 0
) -> None:
    """So much at the price of a million tokens."""
    taken = hold(shop, name, model, held, service)
    usage = Usage(miss=amount * 1_000_000)
    shop.ledger.settle(taken, usage, Outcome.FINISHED).result()


def left(shop: TestLedger) -> dict[str, str]:
    return {each["reference"]: each["left"] for each in grant_documents(shop.ledger.store, "acme")}


def test_only_what_fits_spends_it_and_before_all_other_money(shop: TestLedger) -> None:
    give(shop, "any", 10)
    give(shop, "chat", 5, "chat*")
    shop.fund(10 * UNITS)
    charge(shop, "r1", "embed", 2)
    assert {"chat": "5.00", "any": "8.00"} == left(shop)
    charge(shop, "r2", "chat-1", 3)
    assert {"chat": "2.00", "any": "8.00"} == left(shop)
    charge(shop, "r3", "chat-2", 11)
    account = shop.accounts.tenant("acme")
    assert (0, 0, 9 * UNITS) == (account.scoped, account.granted, account.topup)
    last = entries(shop.ledger.store)[-1]
    assert {"scoped": "-2.00", "granted": "-8.00", "topup": "-1.00"} == {
        name: f"{units / UNITS:.2f}" for name, units in last.amounts.items() if name != "revenue"
    }
    assert {"2": str(-2 * UNITS)} == last.details["scoped"]


def test_of_two_that_fit_the_one_that_expires_first_is_spent_first(shop: TestLedger) -> None:
    give(shop, "late", 5, "chat*", days=9)
    give(shop, "soon", 5, "*", days=3)
    give(shop, "never", 5, "chat-1")
    charge(shop, "r1", "chat-1", 7)
    assert {"late": "3.00", "never": "5.00"} == left(shop)
    assert ["late", "never"] == list(left(shop))


def test_a_term_of_the_price_is_a_scope(shop: TestLedger) -> None:
    give(shop, "batch", 5, "*@batch")
    shop.fund(9 * UNITS)
    charge(shop, "r1", "chat", 2)
    assert {"batch": "5.00"} == left(shop)
    charge(shop, "r2", "chat", 2, "batch")  # at half the price
    assert {"batch": "4.00"} == left(shop)


def test_a_group_of_the_card_is_a_scope(shop: TestLedger) -> None:
    shop.accounts.create_tenant("bolt", "CNY", by="test")
    give(shop, "g", 5, "*@friends", tenant="bolt")
    taken = hold(shop, "r1", "chat", 5, tenant="bolt")
    shop.ledger.settle(taken, Usage(miss=10_000_000), Outcome.FINISHED).result()
    account = shop.accounts.tenant("bolt")
    assert (0, 0) == (account.scoped, account.balance)


def test_a_hold_counts_what_fits_it_and_no_more(shop: TestLedger) -> None:
    give(shop, "chat", 5, "chat*")
    with pytest.raises(InsufficientBalance, match=r"0\.00 CNY is available"):
        hold(shop, "r1", "embed", 1)
    with pytest.raises(InsufficientBalance, match=r"5\.00 CNY is available"):
        hold(shop, "r2", "chat", 6)
    taken = hold(shop, "r3", "chat", 3)
    with pytest.raises(InsufficientBalance, match=r"2\.00 CNY is available"):
        hold(shop, "r4", "chat", 3)
    assert 5 * UNITS == shop.ledger.top_up(taken, 2 * UNITS).result()
    with pytest.raises(InsufficientBalance):
        shop.ledger.top_up(taken, 1).result()


def test_two_prices_cannot_both_wait_for_the_same_grant(shop: TestLedger) -> None:
    """`chat` could leave `both` to `embed`, but nobody knows what it will have spent."""
    give(shop, "both", 10, "chat", "embed", days=1)
    give(shop, "chat", 10, "chat")
    hold(shop, "r1", "embed", 10)
    with pytest.raises(InsufficientBalance):
        hold(shop, "r2", "chat", 10)
    shop.fund(10 * UNITS)
    second = hold(shop, "r3", "chat", 10)
    shop.ledger.settle(second, Usage(miss=10_000_000), Outcome.FINISHED).result()


def test_nothing_of_it_is_paid_out_or_held_in_advance(shop: TestLedger) -> None:
    give(shop, "chat", 100, "chat")
    about = {"reference": "w", "by": "eve", "reason": "wants it"}
    with pytest.raises(InsufficientBalance):
        shop.ledger.post(Deposit("acme", Kind.WITHDRAWAL, amount=1, **about)).result()
    assert 0 == shop.accounts.tenant("acme").available


def test_what_is_given_back_goes_to_the_grant_last(shop: TestLedger) -> None:
    give(shop, "soon", 2, "chat", days=3)
    give(shop, "late", 2, "chat", days=9)
    shop.fund(3 * UNITS)
    charge(shop, "r1", "chat", 6)
    assert {} == left(shop)

    def correct(reference: str, amount: int) -> dict[str, str]:
        about = {"reference": reference, "by": "eve", "reason": "sorry"}
        shop.ledger.correct("acme", "r1", amount=amount * UNITS, **about).result()
        return left(shop)

    assert {} == correct("c1", 2)  # the paid money
    assert {"late": "1.00"} == correct("c2", 1)
    assert {"soon": "1.00", "late": "2.00"} == correct("c3", 2)
    charge(shop, "r2", "chat", 1)
    assert {"late": "2.00"} == left(shop)


def test_a_scoped_grant_ends_with_what_is_left_of_it(shop: TestLedger) -> None:
    give(shop, "any", 7, days=2)
    give(shop, "chat", 5, "chat", days=1)
    charge(shop, "r1", "chat", 2)
    shop.clock.advance(86_400)
    assert 1 == shop.ledger.expire()
    expired = entries(shop.ledger.store)[-1]
    assert (Kind.EXPIRY, "chat", -3 * UNITS) == (expired.kind, expired.request_id, expired.amount)
    assert {"any": "7.00"} == left(shop)
    shop.clock.advance(86_400)
    shop.ledger.expire()
    assert 0 == shop.accounts.tenant("acme").balance


def test_one_that_was_mistyped_is_put_right_and_what_was_spent_of_it_is_owed(
    shop: TestLedger,
) -> None:
    give(shop, "chat", 5, "chat")
    about = {"by": "eve", "reason": "typed wrong"}
    shop.ledger.post(Adjust("acme", "chat", amount=8 * UNITS, reference="a", **about)).result()
    assert {"chat": "8.00"} == left(shop)
    charge(shop, "r1", "chat", 6)
    shop.ledger.post(Adjust("acme", "chat", amount=1 * UNITS, reference="b", **about)).result()
    account = shop.accounts.tenant("acme")
    assert (0, 5 * UNITS) == (account.scoped, account.owed)


def test_a_reference_keeps_its_scope(shop: TestLedger) -> None:
    assert give(shop, "g", 2, "chat", "chat") == give(shop, "g", 2, "chat")
    with pytest.raises(AlreadyExists, match="another scope"):
        give(shop, "g", 2, "embed")
    with pytest.raises(AlreadyExists, match="another scope"):
        give(shop, "g", 2)


@pytest.mark.parametrize(
    ("scope", "told"),
    [
        ("chat@", "write MODEL or MODEL@TERM"),
        ("@batch", "write MODEL or MODEL@TERM"),
        ("chat@bach", "no rate card in CNY has a window, group or service tier 'bach'"),
        ("chat\n", "does not print"),
    ],
)
def test_a_scope_that_nothing_fits_is_said(shop: TestLedger, scope: str, told: str) -> None:
    with pytest.raises(InvalidName, match=told):
        give(shop, "g", 1, scope)


def test_a_model_that_no_card_prices_is_said(house: TestLedger) -> None:
    house.accounts.create_tenant("yen", "JPY", by="test")
    with pytest.raises(InvalidName, match="no rate card in JPY prices model 'chat'"):
        give(house, "g", 1, "chat", tenant="yen")
    with pytest.raises(InvalidName, match="at most 20"):
        give(house, "g", 1, *["chat"] * 21)


def test_rebuild_finds_what_is_left_from_the_entries(shop: TestLedger) -> None:
    give(shop, "chat", 5, "chat")
    charge(shop, "r1", "chat", 2)
    with shop.ledger.store.writing() as connection:
        connection.exec_driver_sql("UPDATE scoped_grants SET remains = '7'")
    (problem,) = audit.verify(shop.ledger.store).problems
    assert ("grant acme/1", "projected") == (problem.tenant, problem.invariant)
    assert audit.rebuild(shop.ledger.store).ok
    assert {"chat": "3.00"} == left(shop)


# -- random histories, against a plain model ------------------------------------------------------

SCOPES = [["a"], ["b"], ["a", "b"], ["b", "c"], ["*@batch"], ["a@batch", "c"], ["*"]]


def fits(scope: list[str], model: str, service: str) -> bool:
    return any(
        each.split("@")[0] in ("*", model) and each.split("@")[1:] in ([], [service])
        for each in scope
    )


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_overdrawn_or_spent_twice(tmp_path: Any, seed: int) -> None:
    """Holds of several prices overlap on grants that overlap; requests cost at most their holds."""
    draw = random.Random(seed)
    with running_ledger(f"sqlite:///{tmp_path / 'ledger'}") as house:
        house.accounts.apply_card(parse_card(CARD), by="ops")
        store, book = house.ledger.store, house.accounts.book

        def apply(command: Command) -> Any:
            ((result,), _) = store.apply([command], book, house.clock)
            return result

        grants: dict[str, tuple[int, list[str], int]] = {}  # name: when it ends, scope, left
        granted = paid = 0
        running: dict[str, tuple[Hold, int]] = {}
        charged: list[str] = []
        refused = 0
        for step in range(120):
            name, move = f"n{step}", draw.random()
            model, service = draw.choice("abc"), draw.choice(["", "batch"])
            if move < 0.08:
                amount, scope = draw.randrange(1, 30), draw.choice(SCOPES)
                ends = START_NS + draw.randrange(1, 9) * DAY_NS
                about = (amount * UNITS, "eve", "", ends, tuple(scope))
                apply(Deposit("acme", Kind.GRANT, name, *about))
                grants[name] = ends, scope, amount * UNITS
            elif move < 0.10:
                kind = draw.choice([Kind.GRANT, Kind.TOPUP])
                amount = draw.randrange(1, 6) * UNITS
                apply(Deposit("acme", kind, name, amount, "eve", ""))
                granted, paid = (
                    granted + amount * (kind is Kind.GRANT),
                    paid + amount * (kind is Kind.TOPUP),
                )
            elif move < 0.55:
                terms = Terms(tenant="acme", service=service)
                pinned = book.at(model, house.clock(), "CNY", terms)
                taken = Hold("acme", name, pinned, RequestContext(admitted_ns=house.clock()))
                amount = draw.randrange(1, 20) * UNITS
                answer = apply(Reserve(taken, amount, 2**62, "s", "b"))
                within = sum(left for _, s, left in grants.values() if fits(s, model, service))
                if not running:
                    fitted = amount <= paid + granted + within
                    assert fitted == (answer == taken)
                if isinstance(answer, InsufficientBalance):
                    refused += 1
                else:
                    running[name] = taken, amount
            elif move < 0.62 and running:
                name = draw.choice([*running])
                taken, amount = running[name]
                if apply(TopUp(taken, UNITS, 2**62, None)) == amount + UNITS:
                    running[name] = taken, amount + UNITS
            elif move < 0.95 and running:
                name = draw.choice([*running])
                taken, amount = running.pop(name)
                term = taken.pinned.ref.window.split(" | ")[-1]
                half = 2 if term == "batch" else 1
                tokens = amount * half // UNITS * 1_000_000
                if draw.random() < 0.3:
                    tokens = draw.randrange(tokens // 1_000_000 + 1) * 1_000_000
                done = apply(Settle(taken, Usage(miss=tokens), Outcome.FINISHED, True))
                assert isinstance(done, Settled)
                due = tokens // half * 1_000_000
                assert due == done.charge.amount
                charged.append(name)
                order = sorted(grants, key=lambda g: (grants[g][0], int(g[1:])))
                for grant in order:
                    ends, scope, left_of = grants[grant]
                    if fits(scope, taken.pinned.ref.model, term):
                        part = min(left_of, due)
                        grants[grant], due = (ends, scope, left_of - part), due - part
                part = min(granted, due)
                granted, paid = granted - part, paid - (due - part)
            elif charged:
                name = draw.choice(charged)
                apply(Correct("acme", name, f"c{step}", None, "eve", ""))
                grants, granted, paid = stands(house, grants)
            account = house.accounts.tenant("acme")
            assert 0 == account.owed, "a running request was not covered"
            assert (granted, paid) == (account.granted, account.topup)
            assert {g: n for g, (_, _, n) in grants.items() if n} == {
                g.reference: g.left for g in scoped_of(house) if g.left
            }
        assert refused > 3
        assert audit.verify(store).problems == []


def scoped_of(house: TestLedger) -> list[Any]:
    from billing.store.reports import all_accounts
    from billing.store.scoped import read_scoped, scoped_rows

    with house.ledger.store.reading() as connection:
        account = all_accounts(connection)["acme"]
        read_scoped(scoped_rows(connection, ["acme"]), {"acme": account})
    return list(account.grants.values())


def stands(house: TestLedger, grants: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """After a correction, whose order other tests show: as the ledger says."""
    left_of = {grant.reference: grant.left for grant in scoped_of(house)}
    account = house.accounts.tenant("acme")
    kept = {name: (ends, scope, left_of[name]) for name, (ends, scope, _) in grants.items()}
    return kept, account.granted, account.topup
