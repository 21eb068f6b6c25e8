"""PostgreSQL ends connections at any moment, and commits whose answer nobody hears: every answered
request is charged once, and nothing else is.
"""

import random
import threading
import time
from contextlib import closing, contextmanager
from functools import partial

import psycopg
import pytest
from sqlalchemy import create_engine, text

from billing.errors import LedgerUnavailable, StoreError
from billing.gate.entries import Kind
from billing.money import UNITS
from billing.proof import audit
from billing.store import reports as store_reports
from billing.store.claim import CLAIMS
from billing.store.opening import open_store
from billing.usage import Usage
from tests.patience import until
from tests.postgres_server import fresh_database, postgres_server
from tests.support.billing import charges_of, running_ledger
from tests.support.threads import beside, ending

pytestmark = pytest.mark.postgres

USED = Usage(miss=3, output=2)
COST = 7_000_000


@pytest.fixture(scope="module")
def postgres():
    with postgres_server() as url:
        yield url


@pytest.fixture
def url(postgres):
    with fresh_database(postgres) as database:
        yield database


@pytest.fixture
def house(url):
    with running_ledger(url) as house:
        house.fund(10**6 * UNITS)
        yield house


def ask(house, name):
    hold = house.reserve(name, 10**7)
    house.ledger.top_up(hold, 1, usage=Usage(miss=3, output=1)).result()
    house.settle(hold, USED)


def prove(house, answered):
    """Every answered request was charged once, and no other but those that were left behind."""
    for _ in range(5):  # what broke off before it could be settled
        house.ledger._leases.clear()
        house.ledger.sweeper.sweep()
    assert audit.verify(house.ledger.store).problems == []
    with house.ledger.store.reading() as connection:
        assert store_reports.hold_list(connection) == []
    charges = charges_of(house.ledger.store)
    paid = {entry.request_id: -entry.amount for entry in charges}
    assert len(paid) == len(charges), "charged twice"
    assert set(answered) <= paid.keys(), "an answer was free"
    assert {paid[name] for name in answered} == {COST}


def test_a_commit_whose_answer_is_lost_is_not_done_twice(house, monkeypatch, caplog):
    """The connection ends between the commit and the word of it, each third time."""
    commit, calls = psycopg.Connection.commit, iter(range(10**9))

    def commit_and_break(connection):
        commit(connection)
        if threading.current_thread().name.startswith("ledger-") and next(calls) % 3 == 0:
            connection.close()
            raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(psycopg.Connection, "commit", commit_and_break)
    answered = [f"r{number}" for number in range(20)]
    for name in answered:
        ask(house, name)
    assert "without its hold" not in caplog.text
    deposit = house.deposit(Kind.TOPUP, 7, "d")
    assert deposit.amount == 7
    monkeypatch.undo()
    until(lambda: not house.account().held)  # an advance: the tenant was quiet for a second
    assert house.account().balance == 10**6 * UNITS - 20 * COST + 7
    prove(house, answered)


def test_connections_ended_at_random_cost_no_tenant_anything(house, postgres):
    answered = []
    over = threading.Event()

    def client(number):
        turn = 0
        while not over.is_set():
            turn += 1
            try:
                ask(house, f"{number}-{turn}")
            except LedgerUnavailable:
                continue
            answered.append(f"{number}-{turn}")

    dice = random.Random(7)
    asking = beside(*(partial(client, number) for number in range(6)))
    with asking, ending(over), administrator(postgres) as ask_postgres:
        for _ in range(30):
            time.sleep(dice.uniform(0.005, 0.06))
            ask_postgres(END_ALL)
        until(lambda: len(answered) > 20)
    prove(house, answered)


END_ALL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'ledger\\_%'"
HOLDER = f"SELECT min(pid) FROM pg_locks WHERE locktype = 'advisory' AND classid = {CLAIMS}"


def test_a_server_takes_its_name_again_after_the_database_restarted(house, url, postgres):
    """A second one of its name would settle its running requests, for nothing."""
    house.ledger.store.claim("server", wait_s=0)
    hold = house.reserve("r1", 10**7)
    with administrator(postgres) as ask_postgres:
        before = ask_postgres(HOLDER)  # which may live on for a moment after it was ended
        ask_postgres(END_ALL)
        until(lambda: ask_postgres(HOLDER) not in (0, before))
    with closing(open_store(url)) as second, pytest.raises(StoreError, match="another server"):
        second.claim("server", wait_s=0)
    assert not house.settle(hold, USED).repeated


def test_a_server_waits_for_its_database_to_take_its_name_again(url, postgres):
    name = url.rpartition("/")[2]
    with closing(open_store(url)) as first, closing(open_store(url)) as second:
        first.claim("server", wait_s=0)
        with administrator(postgres) as ask_postgres:
            ask_postgres(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            ask_postgres(END_ALL)
            for _ in range(2):
                with pytest.raises(LedgerUnavailable):
                    first.check_claim()
            ask_postgres(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        first.check_claim()
        assert first.failed == ""
        with pytest.raises(StoreError, match="another server"):
            second.claim("server", wait_s=0)


def test_a_server_whose_name_was_taken_meanwhile_writes_no_more(url, postgres):
    with closing(open_store(url)) as first, closing(open_store(url)) as second:
        first.claim("server", wait_s=0)
        with administrator(postgres) as ask_postgres:
            ask_postgres(END_ALL)
        second.claim("server", wait_s=60)
        first.check_claim()
        assert "another server has taken this server's name" in first.failed
        with pytest.raises(LedgerUnavailable, match=r"billing\.server_name"):
            first.retrying(lambda connection: None)
        second.check_claim()
        assert second.failed == ""


@contextmanager
def administrator(postgres):
    """Asks PostgreSQL itself: a statement, and the number it gives."""
    engine = create_engine(postgres, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:

            def ask_postgres(statement):
                found = connection.execute(text(statement))
                return int(found.scalar() or 0) if found.returns_rows else 0

            yield ask_postgres
    finally:
        engine.dispose()
