"""Two servers spend one balance or one limit to its last request, and are killed meanwhile.

Each has eight clients. Beside a limit, each also has a cashier that pays in, pays out and puts
deposits right. Whatever dies when: every answer is charged once and exactly, nobody else pays, what
the cashier has booked stands, the bound is not passed, and what is left of it in the end is less
than one request.
"""

import itertools
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from billing.accounts import Accounts
from billing.budgets import Of, set_budget
from billing.errors import InsufficientBalance, SpendLimitReached
from billing.gate.commands import Adjust, Deposit
from billing.gate.entries import Kind
from billing.gate.holds import RequestContext
from billing.gate.limits import SpendLimit
from billing.gate.outcomes import PRESUMED, Outcome
from billing.ledger import Ledger
from billing.money import UNITS
from billing.store import limits as store_limits
from billing.store import reports as store_reports
from billing.store.opening import open_store
from billing.usage import Usage
from tests.children import start_child
from tests.support.billing import booked, running_ledger

HOLD, MORE, COST = 10_000_000, 2_000_000, 9_000_000  # of one request, in units
BOUND = 500 * COST + 5  # of the balance or the tenant's limit; never a whole number of requests
USERS = 3
OF_USER = 200 * COST + 3  # of each user: three of them reach the tenant's limit first
KILLS = int(os.environ.get("LEDGER_KILLS", "6"))  # 50 by hand


def spend(url, owner, run, users, answers):
    """A server's clients, and its cashier if there are users. Each answer is a line of the file."""
    with closing(open_store(url)) as store, answers.open("a", buffering=1) as answered:
        accounts = Accounts(store)
        ledger = Ledger(store, accounts, owner=owner)
        ledger.start()
        lock, over = threading.Lock(), threading.Event()

        def say(name):
            with lock:
                answered.write(f"{name}\n")

        def client(number):
            context = RequestContext(user=f"u{number % users}" if users else "")
            pinned = ledger.book.at("model", time.time_ns(), "CNY")
            for turn in itertools.count():
                name = f"{owner}-{run}-{number}-{turn}"
                try:
                    hold = ledger.reserve("acme", name, HOLD, pinned, context=context).result()
                except (InsufficientBalance, SpendLimitReached) as refused:
                    if not passes(refused, accounts):
                        return
                    time.sleep(0.01)  # until those that run have ended
                    continue
                with suppress(InsufficientBalance, SpendLimitReached):
                    ledger.top_up(hold, MORE, usage=Usage(miss=9)).result()
                ledger.settle(hold, Usage(miss=9), Outcome.FINISHED).result()
                say(name)

        def cashier():
            for turn in itertools.count():
                if over.is_set():
                    return
                name, who = f"{owner}-{run}-{turn}", {"by": "ops", "reason": "test"}
                for kind, amount in CASH.items():
                    deposit = Deposit("acme", kind, f"{kind}-{name}", amount, **who)
                    ledger.post(deposit).result()
                adjust = Adjust("acme", f"{Kind.TOPUP}-{name}", f"adjusted-{name}", 900, **who)
                ledger.post(adjust).result()
                say(f"cash-{name}")

        with ThreadPoolExecutor(9) as threads:
            paying = threads.submit(cashier) if users else None
            for done in [threads.submit(client, number) for number in range(8)]:
                done.result()
            over.set()
            if paying is not None:
                paying.result()
        ledger.close()


CASH = {Kind.TOPUP: 1000, Kind.WITHDRAWAL: 300, Kind.CHARGEBACK: 20}


def passes(refused, accounts):
    """Whether a request that was refused may fit once those that run have ended."""
    if isinstance(refused, SpendLimitReached):
        return refused.passes
    return accounts.tenant("acme").held > 0


def told(server, answers):
    """The answered requests; a line cut by the server's death does not count."""
    server.join(300)
    text = answers.read_text()
    return set(text[: text.rfind("\n") + 1].split())


def prepare(url, users):
    with running_ledger(url) as house:
        house.fund(UNITS if users else BOUND)
        limits = ("all", Of.TENANT, "", BOUND), ("users", Of.USER, "*", OF_USER)
        for name, of, value, amount in limits:
            if users:
                budget = SpendLimit(name=name, tenant="acme", amount=amount, of=of, value=value)
                set_budget(house.accounts, budget, by="test", now_ns=time.time_ns(), reason="test")


def spend_with_kills(url, users, dice, folder):
    """Both servers run until the bound ends them; until then one is killed again and again, at
    first alone: a fast disk books all in a tenth of a second."""

    def started(owner, run, answers):
        return start_child(spend, url, owner, run, users, folder / answers), folder / answers

    answered, steady = set(), None
    for run in range(KILLS):
        dying, answers = started("s1", run, str(run))
        while dying.is_alive() and not (answers.exists() and answers.stat().st_size):
            time.sleep(0.001)
        time.sleep(dice.uniform(0.0, 0.2 if steady else 0.01))
        dying.kill()
        answered |= told(dying, answers)
        if run == min(2, KILLS - 1):
            steady = started("s0", 0, "steady")
    last = started("s1", KILLS, "last")
    answered |= told(*last) | told(*steady)
    assert (0, 0) == (last[0].exitcode, steady[0].exitcode)
    return answered


def check_charges(entries, answered):
    """Every answer was paid once and exactly, and what was cut by a kill was presumed. The sum."""
    charges = [entry for entry in entries if entry.kind is Kind.CHARGE]
    assert {1} == set(Counter(entry.request_id for entry in charges).values())
    assert answered <= {entry.request_id for entry in charges}, "an answer was free"
    for entry in charges:
        presumed = entry.details["outcome"] in PRESUMED
        assert presumed or entry.amount == -COST
        assert not (presumed and entry.request_id in answered)
    return -sum(entry.amount for entry in charges)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("users", [0, 1, USERS], ids=["a balance", "a user's", "the tenant's"])
def test_what_may_be_spent_is_spent_to_its_last_request_and_never_passed(url, users, tmp_path):
    """A balance; or a limit far below it, where one user reaches its own first, three together
    that of the tenant."""
    prepare(url, users)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    answered = spend_with_kills(url, users, random.Random(seed), tmp_path)
    cash = {name.removeprefix("cash-") for name in answered if name.startswith("cash-")}
    entries = booked(url)
    total = check_charges(entries, {name for name in answered if not name.startswith("cash-")})
    names = {entry.request_id for entry in entries}
    assert {f"{what}-{name}" for name in cash for what in (*CASH, "adjusted")} <= names
    assert bool(users) == (len(cash) > 5)
    outcomes = {entry.details["outcome"] for entry in entries if entry.kind is Kind.CHARGE}
    # One user's limit may be reached between two kills.
    assert users == 1 or Outcome.CRASHED in outcomes, "who starts again settles what had begun"
    with closing(open_store(url)) as store, store.reading() as connection:
        assert store_reports.hold_list(connection) == []
        rows = store_limits.spending_rows(connection)
        balance = Accounts(store).tenant("acme").balance
    assert balance == sum(entry.amount for entry in entries)
    spent = {(who.limit, who.value): found.charged for who, found in rows.items() if found.charged}
    assert not users or total == spent["all", ""]
    if users == 1:
        assert OF_USER - HOLD < spent["users", "u0"] <= OF_USER
    else:
        assert BOUND - HOLD < total <= BOUND
        assert all(found <= OF_USER for (name, _), found in spent.items() if name == "users")
    print(f"{len(answered)} answered, {BOUND - total} left")
