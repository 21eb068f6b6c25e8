"""Sixteen clients on two servers spend a hard limit to its last unit while servers are killed.

The balance covers far more. Whatever dies when: the limit is not passed, what is left of it in the
end is less than one request, and the proof agrees.
"""

import itertools
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from billing.accounts import Accounts
from billing.budgets import Of, set_budget
from billing.errors import SpendLimitReached
from billing.gate.entries import Kind
from billing.gate.holds import RequestContext
from billing.gate.limits import SpendLimit
from billing.gate.outcomes import Outcome
from billing.ledger import Ledger
from billing.money import UNITS
from billing.proof import audit
from billing.store import limits as store_limits
from billing.store import reports as store_reports
from billing.store.opening import open_store
from billing.usage import Usage
from tests.children import start_child
from tests.support.billing import running_ledger

HOLD, MORE, COST = 10_000_000, 2_000_000, 9_000_000  # of one request, in units
LIMITED = 500 * COST + 5  # of the tenant; never a whole number of requests
USERS = 3
OF_USER = 200 * COST + 3  # of each user: three of them reach the tenant's limit first
KILLS = int(os.environ.get("LIMIT_KILLS", "6"))  # 50 by hand


def spend(url: str, owner: str, run: int, users: int, answers: Path) -> None:
    """A server's clients. Each answer is a line of the file."""
    with closing(open_store(url)) as store, answers.open("a", buffering=1) as answered:
        ledger = Ledger(store, Accounts(store), owner=owner)
        ledger.start()
        lock = threading.Lock()

        def client(number: int) -> None:
            context = RequestContext(user=f"u{number % users}")
            pinned = ledger.book.at("model", time.time_ns(), "CNY")
            for turn in itertools.count():
                name = f"{owner}-{run}-{number}-{turn}"
                try:
                    hold = ledger.reserve("acme", name, HOLD, pinned, context=context).result()
                except SpendLimitReached as refused:
                    if not refused.passes:
                        return
                    time.sleep(0.01)  # until those that run have ended
                    continue
                usage = Usage(miss=9)
                with suppress(SpendLimitReached):
                    ledger.top_up(hold, MORE, usage=usage).result()
                ledger.settle(hold, usage, Outcome.FINISHED).result()
                with lock:
                    answered.write(f"{name}\n")

        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(client, number) for number in range(8)]:
                done.result()
        ledger.close()


def told(server: ForkServerProcess, answers: Path) -> set[str]:
    """The answered requests; a line cut by the server's death does not count."""
    server.join(300)
    text = answers.read_text()
    return set(text[: text.rfind("\n") + 1].split())


def prepare(url: str) -> None:
    with running_ledger(url) as house:
        house.fund(UNITS)
        for name, of, value, amount in (
            ("all", Of.TENANT, "", LIMITED),
            ("users", Of.USER, "*", OF_USER),
        ):
            budget = SpendLimit(name=name, tenant="acme", amount=amount, of=of, value=value)
            set_budget(house.accounts, budget, by="test", now_ns=time.time_ns(), reason="test")


def spend_with_kills(url: str, users: int, dice: random.Random, folder: Path) -> set[str]:
    """Both servers run until the limit ends them; until then one is killed again and again."""
    answered: set[str] = set()
    steady = start_child(spend, url, "s0", 0, users, folder / "steady")
    for run in range(KILLS):
        answers = folder / str(run)
        dying = start_child(spend, url, "s1", run, users, answers)
        while dying.is_alive() and not (answers.exists() and answers.stat().st_size):
            time.sleep(0.001)
        time.sleep(dice.uniform(0.0, 0.2))
        dying.kill()
        answered |= told(dying, answers)
    last = start_child(spend, url, "s1", KILLS, users, folder / "last")
    answered |= told(last, folder / "last") | told(steady, folder / "steady")
    assert (0, 0) == (last.exitcode, steady.exitcode)
    return answered


@pytest.mark.timeout(900)
@pytest.mark.parametrize("users", [1, USERS])
def test_a_limit_is_spent_to_its_last_request_and_never_passed(
    url: str, users: int, tmp_path: Path
) -> None:
    """One user reaches its own limit first, three together that of the tenant."""
    prepare(url)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    answered = spend_with_kills(url, users, random.Random(seed), tmp_path)
    with closing(open_store(url)) as store:
        assert audit.verify(store).problems == []
        with store.reading() as connection:
            assert store_reports.hold_list(connection) == []
            entries = list(store_reports.stream_entries(connection, "acme"))
            rows = store_limits.spending_rows(connection)
        charges = {
            entry.request_id: -entry.amount for entry in entries if entry.kind is Kind.CHARGE
        }
        assert answered <= charges.keys(), "an answer was free"
        spent = {
            (who.limit, who.value): found.charged for who, found in rows.items() if found.charged
        }
        total = spent["all", ""]
        assert sum(charges.values()) == total == UNITS - Accounts(store).tenant("acme").balance
        if users == 1:
            assert OF_USER - HOLD < spent["users", "u0"] <= OF_USER
        else:
            assert LIMITED - HOLD < total <= LIMITED
            assert all(found <= OF_USER for (name, _), found in spent.items() if name == "users")
        print(f"{len(answered)} answered, {len(charges)} charged, {LIMITED - total} left")
