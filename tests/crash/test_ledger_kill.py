"""A process with a ledger under load is killed again and again; afterwards the books are right.

Deposits, withdrawals, chargebacks and adjustments are among the load.
"""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome
from billing.money import UNITS
from tests.support.billing import booked, running_ledger

KILLS = int(os.environ.get("LEDGER_KILLS", "8"))  # 50 by hand
CHILD = """
import itertools, sys, threading
from tests.support.billing import running_ledger
from billing.gate.commands import Adjust, Deposit
from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome
from billing.usage import Usage
url, run = sys.argv[1:]
lock = threading.Lock()
with running_ledger(url) as house:
    pinned = house.ledger.book.at("model", house.clock(), "CNY")
    def client(number):
        for turn in itertools.count():
            name = f"{run}-{number}-{turn}"
            hold = house.ledger.reserve("acme", name, 10**7, pinned).result()
            house.ledger.top_up(hold, 10**6, usage=Usage(miss=3, output=1)).result()
            house.ledger.settle(hold, Usage(miss=3, output=2), Outcome.FINISHED).result()
            with lock:
                print(name, flush=True)
    def cashier():
        for turn in itertools.count():
            name, who = f"{run}-{turn}", {"by": "ops", "reason": "test"}
            house.ledger.post(Deposit("acme", Kind.TOPUP, f"d-{name}", 1000, **who)).result()
            house.ledger.post(Deposit("acme", Kind.WITHDRAWAL, f"w-{name}", 300, **who)).result()
            house.ledger.post(Deposit("acme", Kind.CHARGEBACK, f"b-{name}", 20, **who)).result()
            house.ledger.post(Adjust("acme", f"d-{name}", f"a-{name}", 900, **who)).result()
            with lock:
                print(f"cash-{name}", flush=True)
    threading.Thread(target=cashier, daemon=True).start()
    for number in range(8):
        threading.Thread(target=client, args=(number,), daemon=True).start()
    threading.Event().wait()
"""


def test_after_kill_9_every_answer_is_charged_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    with running_ledger(url) as house:
        house.fund(10**6 * UNITS)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    answered: set[str] = set()
    for number in range(KILLS):
        answered |= _run_and_kill(url, number, rng.uniform(0.05, 0.5))
    with running_ledger(url) as house:
        account = house.account()
        assert account.held == 0
    posted = booked(url)
    moved = {entry.request_id for entry in posted if entry.kind is not Kind.CHARGE}
    paid = {name.removeprefix("cash-") for name in answered if name.startswith("cash-")}
    assert {f"{kind}-{name}" for name in paid for kind in "dwba"} <= moved
    answered = {name for name in answered if not name.startswith("cash-")}
    charged = [entry for entry in posted if entry.kind is Kind.CHARGE]
    names = Counter(entry.request_id for entry in charged)
    assert max(names.values()) == 1
    assert answered <= set(names), "an answer was free"
    for entry in charged:
        crashed = entry.details["outcome"] == Outcome.CRASHED
        assert crashed or entry.amount == -7_000_000
        assert not (crashed and entry.request_id in answered)
    assert len(answered) > 50
    assert account.balance == sum(entry.amount for entry in posted)
    assert len(paid) > 5


def _run_and_kill(url: str, number: int, after_s: float) -> set[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, url, str(number)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    first = child.stdout.readline().strip()
    time.sleep(after_s)
    child.kill()
    rest = child.stdout.read()
    child.wait()
    child.stdout.close()
    complete = rest[: rest.rfind("\n") + 1].split()  # a line cut by the kill does not count
    return {first, *complete}
