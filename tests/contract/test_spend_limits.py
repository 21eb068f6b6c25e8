"""Hard limits: who is refused, what counts, and until when; on each kind of database."""

from contextlib import closing

import pytest

from billing import errors
from billing.budgets import BudgetSpan, Of, remove_budget, set_budget
from billing.gate.entries import Kind
from billing.gate.holds import Hold
from billing.gate.limits import SpendLimit, period_ns
from billing.gate.outcomes import Outcome
from billing.money import UNITS
from billing.proof import audit
from billing.store import limits as store_limits
from billing.store.opening import open_store
from billing.usage import Usage
from tests.contract.forging import forging
from tests.support.billing import entries_of, running_ledger

TOKEN = 2_000_000  # price of one output token under the launch card
DAY_S = 86_400


@pytest.fixture
def house(house):
    house.fund(UNITS)
    return house


def limit(house, tokens, of=Of.TENANT, value="", *, name="cap", tenant="acme", **more):
    about = {"name": name, "tenant": tenant, "of": of, "value": value} | more
    budget = SpendLimit(amount=tokens * TOKEN, **about)
    set_budget(house.accounts, budget, by="ops", now_ns=house.clock(), reason="test")


def remove(house, name="cap"):
    remove_budget(house.accounts, name, by="ops", reason="test")


def spend(house, name, tokens, **context):
    hold = house.reserve(name, tokens * TOKEN, **context)
    house.settle(hold, Usage(output=tokens))


def rows(house):
    with house.ledger.store.reading() as connection:
        return store_limits.spending_rows(connection)


def spent(house):
    """Tokens charged and held, by `period/value` of the limit `cap`."""
    return {
        f"{who.period}/{who.value}": (found.charged // TOKEN, found.held // TOKEN)
        for who, found in rows(house).items()
        if who.limit == "cap"
    }


def test_a_request_that_would_pass_the_limit_is_refused_and_told_why(house):
    limit(house, 10)
    spend(house, "r1", 6)
    running = house.reserve("r2", 3 * TOKEN)
    with pytest.raises(errors.SpendLimitReached) as raised:
        house.reserve("r3", 2 * TOKEN)
    refusal = raised.value
    about = (refusal.limit, refusal.of, refusal.value, refusal.per)
    assert ("cap", "tenant", "", "month") == about
    amounts = (refusal.amount, refusal.spent, refusal.held, refusal.needed)
    assert (10 * TOKEN, 6 * TOKEN, 3 * TOKEN, 2 * TOKEN) == amounts
    assert period_ns("2025-01")[1] == refusal.ends_ns
    assert refusal.passes  # once r2 has ended
    assert "0.000006" in str(refusal) and "2025-02-01T00:00:00Z" in str(refusal)
    spend(house, "r4", 1)  # to the last unit
    house.settle(running, Usage(output=3))
    with pytest.raises(errors.SpendLimitReached) as raised:
        house.reserve("r5", 1)
    assert not raised.value.passes
    assert {"2025-01/": (10, 0)} == spent(house)
    limit(house, 2 * UNITS)
    with pytest.raises(errors.InsufficientBalance):  # too small a balance is refused as that
        house.reserve("r6", UNITS)


def test_an_answer_is_cut_where_the_limit_ends_it(house):
    limit(house, 10)
    hold = house.reserve("r1", 6 * TOKEN)
    house.ledger.top_up(hold, 4 * TOKEN).result()
    with pytest.raises(errors.SpendLimitReached):
        house.ledger.top_up(hold, 1).result()
    assert 10 * TOKEN == house.ledger.top_up(hold, 0, usage=Usage(output=9)).result()  # renews
    house.settle(hold, Usage(output=10), Outcome.BUDGET)
    assert {"2025-01/": (10, 0)} == spent(house)


@pytest.mark.parametrize(
    ("of", "value", "mine", "other"),
    [
        (Of.KEY, "key_1", {"key_id": "key_1"}, {"key_id": "key_2"}),
        (Of.USER, "anna", {"user": "anna"}, {"user": "ben"}),
        (Of.TAG, "team=a", {"tags": (("team", "a"),)}, {"tags": (("team", "b"),)}),
    ],
)
def test_a_limit_counts_its_own_key_user_or_tag_alone(house, of, value, mine, other):
    limit(house, 2, of, value)
    spend(house, "r1", 5, **other)
    spend(house, "r2", 2, **mine)
    with pytest.raises(errors.SpendLimitReached, match="'" + value):
        house.reserve("r3", 1, **mine)
    spend(house, "r4", 5, **other)
    spend(house, "r5", 5)
    assert {f"2025-01/{value}": (2, 0)} == spent(house)


def test_a_request_meets_every_limit_that_counts_it(house):
    limit(house, 9)
    limit(house, 5, Of.USER, "*", name="users")
    limit(house, 3, Of.KEY, "k", name="key", per=BudgetSpan.DAY)
    spend(house, "r1", 3, user="anna", key_id="k")
    with pytest.raises(errors.SpendLimitReached, match="'key'"):
        house.reserve("r2", TOKEN, user="anna", key_id="k")
    spend(house, "r3", 2, user="anna")
    with pytest.raises(errors.SpendLimitReached, match="'users'"):
        house.reserve("r4", TOKEN, user="anna")
    spend(house, "r5", 4, user="ben")
    with pytest.raises(errors.SpendLimitReached, match="'cap'"):
        house.reserve("r6", TOKEN, user="carl")
    charge = next(e for e in entries_of(house.ledger.store) if e.request_id == "r1")
    assert {"cap", "users", "key"} == set(charge.details["limits"])


def test_a_new_month_begins_anew_and_a_request_counts_where_it_was_admitted(house):
    limit(house, 4)
    spend(house, "r1", 2)
    house.clock.advance(31 * DAY_S - 60)
    late = house.reserve("r2", TOKEN, ttl_s=10**7)
    house.clock.advance(120)
    spend(house, "r3", 4)
    assert {"2025-01/": (2, 1), "2025-02/": (4, 0)} == spent(house)
    house.ledger.top_up(late, TOKEN).result()
    with pytest.raises(errors.SpendLimitReached):
        house.ledger.top_up(late, 1).result()
    house.settle(late, Usage(output=2))
    assert {"2025-01/": (4, 0), "2025-02/": (4, 0)} == spent(house)


def test_a_limit_set_in_the_middle_counts_what_was_spent_and_what_runs(house):
    house.clock.advance(-DAY_S)
    spend(house, "december", 5, user="anna")
    house.clock.advance(DAY_S)
    spend(house, "r1", 3, user="anna")
    spend(house, "r2", 4, user="ben")
    house.correct("r1", "c", TOKEN)
    running = house.reserve("r3", 2 * TOKEN, user="anna")
    limit(house, 5, Of.USER, "anna")
    assert {"2025-01/anna": (2, 2)} == spent(house)
    with pytest.raises(errors.SpendLimitReached):
        house.reserve("r4", 2 * TOKEN, user="anna")
    house.settle(running, Usage(output=2))
    spend(house, "r5", 1, user="anna")
    assert {"2025-01/anna": (5, 0)} == spent(house)


def test_a_limit_below_what_is_spent_refuses_the_next_and_a_raised_one_lets_it_in(house):
    spend(house, "r1", 6)
    running = house.reserve("r2", 3 * TOKEN)
    limit(house, 2)
    with pytest.raises(errors.SpendLimitReached):
        house.reserve("r3", 1)
    house.settle(running, Usage(output=3))
    limit(house, 10)
    spend(house, "r4", 1)
    assert {"2025-01/": (10, 0)} == spent(house)
    remove(house)
    spend(house, "r5", 5)
    assert {} == spent(house)
    limit(house, 15)
    with pytest.raises(errors.SpendLimitReached):
        house.reserve("r6", 1)
    remove(house)
    spend(house, "r7", 5)
    with house.ledger.store.reading() as connection:
        assert [] == store_limits.limit_rows(connection)
    assert not house.accounts.store.all_holds()


def test_a_refund_is_not_spent_and_a_lost_answer_not_either(house):
    limit(house, 4)
    spend(house, "r1", 4)
    house.correct("r1", "c", TOKEN)
    assert {"2025-01/": (3, 0)} == spent(house)
    hold = house.reserve("r2", TOKEN, fingerprint="f")
    house.settle(hold, Usage(output=1), delivered=False)
    house.correct("r1", "d")
    spend(house, "r3", 1, fingerprint="f", is_retry=True)
    assert {"2025-01/": (1, 0)} == spent(house)
    hold = house.reserve("r4", 3 * TOKEN)
    house.ledger.void(hold).result()
    assert {"2025-01/": (1, 0)} == spent(house)


def test_what_a_crash_leaves_counts_as_it_was_charged_and_then_as_it_was(house):
    limit(house, 9)
    hold = house.reserve("r1", 5 * TOKEN)
    house.lapse(hold, Usage(output=2))
    assert {"2025-01/": (2, 0)} == spent(house)
    house.settle(hold, Usage(output=4))
    assert {"2025-01/": (4, 0)} == spent(house)


@pytest.mark.parametrize(
    "wrong", [{"of": Of.TAG, "value": "*"}, {"of": Of.USER}, {"value": "ann"}, {"name": "a b"}]
)
def test_only_keys_and_users_each_have_a_limit_and_others_name_one(house, wrong):
    with pytest.raises(errors.InvalidName):
        limit(house, 1, **wrong)


def test_a_change_of_a_budget_is_in_the_trail_and_no_other_tenants(house):
    limit(house, 1)
    limit(house, 2)
    house.accounts.create_tenant("other", "CNY", by="ops")
    with pytest.raises(errors.AlreadyExists, match="'acme'"):
        limit(house, 1, tenant="other")
    with pytest.raises(errors.UnknownTenant):
        limit(house, 1, tenant="nobody")
    remove(house)
    with pytest.raises(errors.UnknownBudget):
        remove(house)
    actions = [row["action"] for row in house.accounts.trail.newest(4)]
    assert ["budget.remove", "tenant.create", "budget.set", "budget.set"] == actions


def test_a_request_that_cost_nothing_leaves_no_row(house):
    """Else invented users would grow the database for free."""
    limit(house, 5, Of.USER, "*")
    for number in range(3):
        hold = house.reserve(f"r{number}", TOKEN, user=f"invented-{number}")
        assert 1 == len(rows(house))
        house.ledger.void(hold).result()
        assert {} == rows(house)
    hold = house.reserve("failed", TOKEN, user="anna")
    house.settle(hold, Usage(), Outcome.FAILED)
    assert {} == rows(house)
    spend(house, "r4", 2, user="anna")
    assert {"2025-01/anna": (2, 0)} == spent(house)


def test_rebuild_restores_what_limits_count(house):
    limit(house, 9, Of.USER, "*")
    spend(house, "r1", 2, user="anna")
    running = house.reserve("r2", TOKEN, user="ben")
    store = house.ledger.store
    with store.writing() as connection:
        store_limits.replace_spending(connection, {})
    [problem] = audit.verify(store).problems
    assert ("projected", "spending cap/2025-01/anna") == (problem.invariant, problem.tenant)
    assert audit.rebuild(store).ok
    assert {"2025-01/anna": (2, 0), "2025-01/ben": (0, 1)} == spent(house)
    house.ledger.void(running).result()


def test_a_pins_past_hour_needs_no_check(house):
    limit(house, 1)
    house.clock.advance(DAY_S)
    pinned = house.ledger.book.at("model", house.clock(), "CNY")
    usage = Usage(storage_token_hours=5)
    hold = house.reserve("probe", 0)
    past = Hold("acme", "pin:p:1:0", pinned, hold.context)
    house.settle(past, usage)
    house.ledger.void(hold).result()
    assert 2 == len([e for e in entries_of(house.ledger.store) if e.kind is Kind.CHARGE])


def swapped(old, new, name="r2", more=""):
    return (
        f"UPDATE entries SET body = replace(body, '{old}', '{new}'){more} "
        f"WHERE request_id = '{name}'"
    )


MORE = ", postings = 'topup:-60000000 revenue:60000000'"
UNCHECKED = "UPDATE entries SET body = json_remove(body, '$.limits', '$.held')"
FORGERIES = {
    "a charge that takes more": ("limited", swapped('"output":3', '"output":30', "r1", MORE)),
    "a hold of more": ("limited", swapped('"held":"6', '"held":"60')),
    "a charge that nobody checked": ("limited", f"{UNCHECKED} WHERE request_id = 'r2'"),
    "a check under a decision of later": ("limited", swapped('{"cap":', '{"cap":9')),
    "a limit raised by nobody": ("decided", "UPDATE budgets SET amount = '99000000000000'"),
    "a limit dropped by nobody": ("decided", "DELETE FROM budgets"),
    "an account without its mark": (
        "projected",
        "UPDATE accounts SET limited = 0 WHERE limited = 1",
    ),
    "less spent": ("projected", "UPDATE spending SET charged = '0'"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_the_proof_finds(tmp_path, name):
    path = tmp_path / "ledger"
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(UNITS)
        limit(house, 10)
        house.clock.advance(DAY_S)
        for request in ("r1", "r2", "r3"):
            spend(house, request, 3)
        assert audit.verify(house.ledger.store).ok
    invariant, statement = FORGERIES[name]
    with forging(path) as plain:
        assert 1 == plain.execute(statement).rowcount
    with closing(open_store(f"sqlite:///{path}")) as store:
        found = {problem.invariant for problem in audit.verify(store).problems}
    assert invariant in found
