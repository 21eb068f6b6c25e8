"""Two server processes with eight clients each spend one balance on one database, at the same time.

The balance covers a part of what is asked. A watcher reads it all the while; in the second test
one of the servers is killed and started again.
"""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager

from billing.accounts import Accounts
from billing.gate.entries import Kind
from billing.gate.outcomes import PRESUMED
from billing.proof import audit
from billing.store import reports as store_reports
from billing.store.opening import open_store
from billing.store.store import LedgerStore
from tests.support.billing import running_ledger

HOLD = 5_000_000  # three misses and one output under the launch card
COST = 5_000_000
ASKED = 2 * 8 * 60
PAID = ASKED // 2 * COST  # half of what is asked
SERVER = """
import sys, threading
from billing.accounts import Accounts
from billing.errors import InsufficientBalance
from billing.ledger import Ledger
from billing.gate.outcomes import Outcome
from billing.prices.cards import default_card
from billing.store.opening import open_store
from billing.usage import Usage
url, owner, run, turns = sys.argv[1:]
store = open_store(url)
ledger = Ledger(store, Accounts(store), owner=owner, first_card=default_card())
ledger.start()
pinned = ledger.book.at("model", 2 * 10**18, "CNY")
lock = threading.Lock()
def say(*words):
    with lock:
        print(*words, flush=True)
def client(number):
    for turn in range(int(turns)):
        name = f"{owner}-{run}-{number}-{turn}"
        try:
            hold = ledger.reserve("acme", name, 3_000_000, pinned).result()
        except InsufficientBalance:
            say("refused", name)
            continue
        try:
            ledger.top_up(hold, 2_000_000, usage=Usage(miss=3)).result()
            usage = Usage(miss=3, output=1)
        except InsufficientBalance:
            usage = Usage(miss=3)
        ledger.settle(hold, usage, Outcome.FINISHED).result()
        say("answered", name, usage.output)
threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
ledger.close()
store.close()
"""


def start(url: str, owner: str, run: str, turns: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SERVER, url, owner, run, str(turns)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@contextmanager
def watched(store: LedgerStore) -> Iterator[list[int]]:
    """What was available at each look, while the block runs."""
    looks: list[int] = []
    over = threading.Event()
    accounts = Accounts(store)

    def look() -> None:
        while not over.wait(0.002):
            available = accounts.tenant("acme").available
            assert available is not None
            looks.append(available)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield looks
    finally:
        over.set()
        watcher.join()


def told(server: "subprocess.Popen[str]") -> list[list[str]]:
    """What a server said until its end; a line cut by its death does not count."""
    assert server.stdout is not None
    text = server.stdout.read()
    server.wait(60)
    server.stdout.close()
    return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]


def prove(url: str, lines: list[list[str]], store: LedgerStore) -> Counter[str]:
    """Every answer was paid once and exactly, and nobody else paid; gives what was said."""
    assert audit.verify(store).problems == []
    with store.reading() as connection:
        assert store_reports.hold_list(connection) == []
        entries = list(store_reports.stream_entries(connection, "acme"))
    charges = {entry.request_id: entry for entry in entries if entry.kind is Kind.CHARGE}
    answered = {line[1]: 3_000_000 + 2_000_000 * int(line[2]) for line in lines if len(line) == 3}
    refused = {line[1] for line in lines if len(line) == 2}
    assert not refused & charges.keys()
    assert {name: -charges[name].amount for name in answered} == answered
    unheard = [charges[name] for name in charges.keys() - answered]
    spent = sum(answered.values()) - sum(entry.amount for entry in unheard)
    assert Accounts(store).tenant("acme").balance == PAID - spent >= 0
    said = Counter(line[0] for line in lines)
    said["presumed"] = sum(entry.details["outcome"] in PRESUMED for entry in unheard)
    return said


def test_two_processes_spend_one_balance_to_its_end_and_not_beyond(url: str) -> None:
    with running_ledger(url) as house:
        house.fund(PAID)
    with closing(open_store(url)) as store:
        with watched(store) as looks:
            servers = [start(url, f"s{number}", "a", ASKED // 16) for number in range(2)]
            lines = [line for server in servers for line in told(server)]
        assert min(looks) >= 0, "two servers overdrew a balance"
        assert [0, 0] == [server.returncode for server in servers]
        said = prove(url, lines, store)
        assert ASKED == said["answered"] + said["refused"]
        assert said["refused"] > 0
        left = Accounts(store).tenant("acme").balance
        assert left < HOLD, f"{left} was left although requests were refused"


def test_a_server_that_dies_among_two_leaves_right_books(url: str) -> None:
    with running_ledger(url) as house:
        house.fund(PAID)
    with closing(open_store(url)) as store:
        with watched(store) as looks:
            steady = start(url, "s0", "a", 40)
            dying = start(url, "s1", "a", 10_000)
            assert dying.stdout is not None
            for _ in range(20):
                dying.stdout.readline()
            dying.kill()
            lines = told(dying)
            again = start(url, "s1", "b", 10)
            lines += told(steady) + told(again)
        assert min(looks) >= 0
        assert (0, 0) == (steady.returncode, again.returncode)
        prove(url, lines, store)
