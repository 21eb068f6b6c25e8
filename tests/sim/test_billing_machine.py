"""A state machine over the gate and the ledger, against a model in plain integers.

Requests, top-ups of holds and balances, hard limits, disconnects, silent retries, crashes between
any two statements of a transaction, restarts, price changes and clock jumps, on two servers that
share one database.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text

from billing.accounts import Accounts
from billing.budgets import Of, remove_budget, set_budget
from billing.errors import InsufficientBalance, LedgerUnavailable, SpendLimitReached
from billing.gate.commands import Command, Correct, Deposit, Reserve, Settle, TopUp
from billing.gate.entries import Kind
from billing.gate.grants import NEVER
from billing.gate.holds import Hold, RequestContext
from billing.gate.limits import SpendLimit, period_of
from billing.gate.outcomes import PRESUMED, Outcome, billable
from billing.gate.work import Settled
from billing.ledger import Ledger
from billing.prices.book import NS
from billing.prices.cards import default_card, parse_card
from billing.prices.rating import rate
from billing.proof import audit
from billing.store.opening import open_store
from billing.store.prepared import Prepared
from billing.store.schema import metadata
from billing.store.store import LedgerStore
from billing.usage import EMPTY, Usage
from tests.postgres_server import fresh_database
from tests.support.billing import ManualClock, fresh_ledger

LEASE_S = 60
AMOUNT = st.integers(0, 3_000_000)
USAGE = st.builds(
    Usage,
    hit_device=st.integers(0, 3),
    hit_disk=st.integers(0, 3),
    miss=st.integers(0, 2),
    output=st.integers(0, 2),
)
PICK = st.integers(0, 10**6)
ENDS = st.sampled_from([Outcome.FINISHED, Outcome.BUDGET, Outcome.CLIENT_GONE, Outcome.FAILED])


class Killed(BaseException):
    """The process dies here."""


@dataclass
class Open:
    """A request as its server sees it."""

    hold: Hold
    server: int
    held: int
    expires_ns: int
    sent: Usage = EMPTY
    answered: bool = False  # a retry of it was delivered while it ran


@dataclass
class Model:
    """What the ledger must say."""

    paid_in: int = 0
    grants: dict[str, tuple[int, int]] = field(default_factory=dict)  # when each ends, and amount
    open: dict[str, Open] = field(default_factory=dict)
    charges: dict[str, tuple[int, Outcome, Hold]] = field(default_factory=dict)
    undelivered: dict[str, list[str]] = field(default_factory=dict)
    beyond_holds: int = 0
    limits: dict[Of, tuple[int, int]] = field(default_factory=dict)  # amount, and since when

    def limited(self, hold, amount):
        """Whether a hard limit refuses `amount` for a request."""
        counted = [(each.hold, each.held) for each in self.open.values()]
        counted += [(charged, cost) for cost, _, charged in self.charges.values()]
        month = period_of("month", hold.context.admitted_ns)
        for of, (most, since_ns) in self.limits.items():
            sum_ = sum(
                units
                for other, units in counted
                if period_of("month", other.context.admitted_ns) == month
                and (of is Of.TENANT or other.context.user == hold.context.user)
            )
            counts = month >= period_of("month", since_ns)
            if amount and counts and sum_ + amount > most:
                return True
        return False

    @property
    def held(self):
        return sum(request.held for request in self.open.values())

    @property
    def worth(self):
        return self.paid_in - sum(amount for amount, _, _ in self.charges.values())


Databases = Callable[[], AbstractContextManager[list[LedgerStore]]]  # an empty one, opened twice


@contextmanager
def sqlite_file(folder):
    """A new file for each example."""
    url = fresh_ledger(folder / str(len(list(folder.iterdir()))) / "ledger")
    with ExitStack() as scope:
        yield [scope.enter_context(closing(open_store(url))) for _ in range(2)]


@contextmanager
def emptied(stores):
    """One database, emptied for each example."""
    names = ", ".join(table.name for table in metadata.sorted_tables)
    with stores[0].writing() as connection:
        connection.execute(text(f"TRUNCATE {names}"))
    yield stores


class LedgerMachine(RuleBasedStateMachine):
    """One tenant, two servers, each with connections of its own."""

    databases: ClassVar[Databases]  # as a static method

    @initialize(paid=st.integers(0, 30_000_000))
    def begin(self, paid):
        self.scope = ExitStack()
        self.clock = ManualClock()
        self.stores = self.scope.enter_context(self.databases())
        self.accounts = Accounts(self.stores[0], clock_ns=self.clock)
        self.accounts.prepare(default_card())
        self.accounts.create_tenant("acme", "CNY", by="test")
        self.ledgers = [
            Ledger(store, self.accounts, owner=f"s{number}", clock_ns=self.clock)
            for number, store in enumerate(self.stores)
        ]
        self.model = Model(paid_in=paid)
        self.names = 0
        if paid:
            self.apply(0, Deposit("acme", Kind.TOPUP, "first", paid, "test", ""))

    def teardown(self):
        if not hasattr(self, "stores"):
            return
        with self.scope:
            problems = audit.verify(self.stores[0]).problems
            assert problems == [], problems

    def apply(self, server, command, die_at=0):
        """Run one command; with `die_at`, its process dies before that statement and another
        retries.
        """
        return self.apply_all(server, [command], die_at)[0]

    def apply_all(self, server, commands, die_at=0):
        store = self.stores[server]
        if die_at:
            with dying(die_at), suppress(Killed):
                store.apply(commands, self.accounts.book, self.clock)
        try:
            return store.apply(commands, self.accounts.book, self.clock)[0]
        except LedgerUnavailable as error:
            raise AssertionError(error) from error

    # -- requests ----------------------------------------------------------------------------------

    @rule(server=st.integers(0, 1), amounts=st.lists(AMOUNT, min_size=1, max_size=4),
          fingerprint=st.sampled_from(["", "f", "g"]), retry=st.booleans(),
          user=st.sampled_from(["", "anna"]), die_at=st.integers(0, 8))  # fmt: skip
    def reserve(self, server, amounts, fingerprint, retry, user, die_at):
        """Several come at once, or no other rule would find many that are open."""
        context = RequestContext(
            fingerprint=fingerprint, is_retry=retry, admitted_ns=self.clock(), user=user
        )
        for amount in amounts:
            self._reserve(server, amount, context, die_at)

    def _reserve(self, server, amount, context, die_at):
        self.names += 1
        name = f"r{self.names}"
        pinned = self.accounts.book.at("m", self.clock(), "CNY")
        hold = Hold("acme", name, pinned, context)
        expires_ns = self.clock() + LEASE_S * NS
        command = Reserve(hold, amount, expires_ns, f"s{server}", "b")
        result = self.apply(server, command, die_at)
        if result == hold:  # said again by whoever did not hear of it
            assert self.apply(server, command) == hold
        available = self.model.worth - self.model.held
        if self.model.limited(hold, amount):
            assert isinstance(result, SpendLimitReached)
        elif amount and amount > available:
            assert isinstance(result, InsufficientBalance)
        else:
            assert result == hold
            self.model.open[name] = Open(hold, server, amount, expires_ns)

    @precondition(lambda self: self.model.open)
    @rule(amount=AMOUNT, usage=USAGE, die_at=st.integers(0, 8))
    def top_up(self, amount: int, usage: Usage, die_at: int) -> None:
        """Of every open request, one after another."""
        for request in list(self.model.open.values()):
            self._top_up(request, amount, usage, die_at)

    def _top_up(self, request, amount, usage, die_at):
        expires_ns = self.clock() + LEASE_S * NS
        fits = amount <= self.model.worth - self.model.held
        limited = self.model.limited(request.hold, amount)
        before = request.held
        command = TopUp(request.hold, amount, expires_ns, usage)
        if die_at:  # a top-up is no idempotent command: dead or done, it is not said again
            store = self.stores[request.server]
            with dying(die_at), suppress(Killed):
                store.apply([command], self.accounts.book, self.clock)
            found = {held.request_id: held for held in store.all_holds()}
            stored = found[request.hold.request_id]
            assert stored.amount in (before, before + amount)
            request.held, request.sent = stored.amount, stored.usage
            request.expires_ns = stored.expires_ns
            return
        result = self.apply(request.server, command)
        if limited:
            assert isinstance(result, SpendLimitReached)
        elif amount > 0 and not fits:
            assert isinstance(result, InsufficientBalance)
        else:
            assert result == before + amount
            request.held, request.sent = before + amount, usage
            request.expires_ns = max(request.expires_ns, expires_ns)

    @precondition(lambda self: self.model.open)
    @rule(pick=PICK, usage=USAGE, outcome=ENDS,
          delivered=st.booleans(), die_at=st.integers(0, 12))  # fmt: skip
    def settle(
        self, pick: int, usage: Usage, outcome: Outcome, delivered: bool, die_at: int
    ) -> None:
        request = self._pick(pick)
        command = Settle(request.hold, usage, outcome, delivered)
        result = self.apply(request.server, command, die_at)
        assert isinstance(result, Settled)
        self._charged(request, billable(usage, outcome, delivered=delivered), outcome, delivered)
        again = self.apply(1 - request.server, command)
        assert isinstance(again, Settled) and again.repeated

    @precondition(lambda self: len(self.model.open) > 1)
    @rule(server=st.integers(0, 1), how=st.lists(st.tuples(USAGE, ENDS, st.booleans()),
          min_size=2, max_size=4), order=st.randoms(use_true_random=False),
          die_at=st.integers(0, 25))  # fmt: skip
    def settle_together(
        self, server: int, how: list[tuple[Usage, Outcome, bool]], order: Random, die_at: int
    ) -> None:
        """Several in one transaction, as a ledger that is waited for commits them."""
        requests = order.sample(sorted(self.model.open), min(len(how), len(self.model.open)))
        holds = [self.model.open[name].hold for name in requests]
        commands: list[Command] = [
            Settle(hold, *end) for hold, end in zip(holds, how, strict=False)
        ]
        results = self.apply_all(server, commands, die_at)
        for name, result, (usage, outcome, delivered) in zip(requests, results, how, strict=False):
            assert isinstance(result, Settled)
            billed = billable(usage, outcome, delivered=delivered)
            self._charged(self.model.open[name], billed, outcome, delivered)

    @precondition(lambda self: self.model.charges)
    @rule(pick=PICK, usage=USAGE, delivered=st.booleans())
    def settle_late(self, pick: int, usage: Usage, delivered: bool) -> None:
        """A server comes back to what was presumed, or to an answer that was lost after all."""
        names = sorted(self.model.charges)
        name = names[pick % len(names)]
        amount, outcome, hold = self.model.charges[name]
        result = self.apply(0, Settle(hold, usage, Outcome.FINISHED, delivered))
        assert isinstance(result, Settled) and result.repeated
        if outcome in PRESUMED:
            new = rate(usage, hold.pinned).amount
            self.model.beyond_holds += max(0, new - amount)
            amount = new
            self.model.charges[name] = (amount, Outcome.FINISHED, hold)
            if delivered and hold.context.is_retry and hold.context.fingerprint:
                self._forgive(hold.context.fingerprint)
        if not delivered and amount and hold.context.fingerprint:
            lost = self.model.undelivered.setdefault(hold.context.fingerprint, [])
            lost.extend({name} - set(lost))

    # -- time and death ----------------------------------------------------------------------------

    @rule(seconds=st.integers(-1000, 200))
    def jump(self, seconds):
        self.clock.advance(seconds)

    @rule(server=st.integers(0, 1))
    def sweep(self, server):
        now_ns = self.clock()
        due = [request for request in self.model.open.values() if request.expires_ns <= now_ns]
        assert len(due) == self.ledgers[server].sweeper.sweep()
        self._presumed(due, Outcome.LAPSED)
        left = self.stores[server].all_holds()
        assert all(hold.expires_ns > now_ns for hold in left), "a hold outlives its lease"

    @rule(server=st.integers(0, 1))
    def crash_and_restart(self, server):
        left = [request for request in self.model.open.values() if request.server == server]
        self.ledgers[server].sweeper.recover()
        self._presumed(left, Outcome.CRASHED)

    def _presumed(self, requests, outcome):
        for request in requests:
            self._charged(request, billable(request.sent, outcome), outcome, True)

    # -- money and prices --------------------------------------------------------------------------

    @rule(amount=st.integers(1, 9_000_000), kind=st.sampled_from([Kind.GRANT, Kind.TOPUP]),
          ends_in=st.sampled_from([None, -1, 0, 1]), die_at=st.integers(0, 8))  # fmt: skip
    def deposit(self, amount, kind, ends_in, die_at):
        """Money that is paid, or granted for ever or for a time."""
        self.names += 1
        name, expires_ns = f"d{self.names}", 0
        if kind is Kind.GRANT and ends_in is not None:
            expires_ns = self.clock() + ends_in * 150 * NS + self.names  # no two at once
        command = Deposit("acme", kind, name, amount, "test", "", expires_ns)
        self.apply(0, command, die_at)
        self.apply(1, command)
        self.model.paid_in += amount
        if kind is Kind.GRANT:
            self.model.grants[name] = (expires_ns or NEVER, amount)

    @rule(server=st.integers(0, 1), again=st.booleans())
    def expire(self, server, again):
        """What was spent of the granted money was spent of what ends first."""
        granted = self.accounts.tenant("acme").granted
        spent = sum(amount for _, amount in self.model.grants.values()) - granted
        ended = 0
        for name, (expires_ns, amount) in sorted(self.model.grants.items(), key=lambda g: g[1][0]):
            left = amount - min(amount, max(0, spent))
            spent -= amount - left
            if expires_ns <= self.clock():
                del self.model.grants[name]
                self.model.paid_in -= left
                self.model.beyond_holds += left
                ended += 1
        assert ended == self.ledgers[server].sweeper.expire()
        assert 0 == self.ledgers[1 - server].sweeper.expire() if again else True

    @precondition(lambda self: self.model.charges)
    @rule(pick=PICK, die_at=st.integers(0, 8))
    def correct(self, pick: int, die_at: int) -> None:
        names = sorted(self.model.charges)
        name = names[pick % len(names)]
        cost, _, hold = self.model.charges[name]
        command = Correct("acme", name, f"c:{name}", None, "test", "")
        self.apply(0, command, die_at)
        self.apply(1, command)
        if cost:  # else nothing is left to give back, and it is refused
            self.model.charges[name] = (0, Outcome.FINISHED, hold)

    @rule(amount=st.integers(1, 9_000_000), of=st.sampled_from([Of.TENANT, Of.USER]),
          lift=st.booleans())  # fmt: skip
    def limit(self, amount, of, lift):
        """Sets, changes or lifts a hard limit of a month, by a clock that was not set back since
        a running request was admitted."""
        now_ns = self.clock()
        if any(each.hold.context.admitted_ns > now_ns for each in self.model.open.values()):
            return
        if lift and of in self.model.limits:
            remove_budget(self.accounts, of, by="test", reason="test")
            del self.model.limits[of]
            return
        value = "*" if of is Of.USER else ""
        budget = SpendLimit(name=of, tenant="acme", amount=amount, of=of, value=value)
        set_budget(self.accounts, budget, by="test", now_ns=now_ns, reason="test")
        _, since_ns = self.model.limits.get(of, (0, now_ns))
        self.model.limits[of] = amount, since_ns

    @rule(hit=st.integers(0, 3), miss=st.integers(3, 9))
    def change_price(self, hit, miss):
        if len(self.accounts.book.cards) > 4:
            return
        number = len(self.accounts.book.cards) + 1
        text = (
            f'[card]\nname="c"\nversion="{number}"\nvalid_from=2024-12-0{number}T00:00:00Z\n'
            f'currency="CNY"\n[[model]]\nmatch="*"\nhit=0.{hit}\nmiss=0.{miss}\noutput=1\n'
        )
        self.accounts.apply_card(parse_card(text), by="test")

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def balances_are_the_models(self):
        if not hasattr(self, "accounts"):
            return
        account = self.accounts.tenant("acme")
        assert (account.balance, account.held) == (self.model.worth, self.model.held)
        assert account.balance - account.held >= -self.model.beyond_holds

    def _pick(self, pick):
        names = sorted(self.model.open)
        return self.model.open[names[pick % len(names)]]

    def _charged(self, request, usage, outcome, delivered):
        hold, name = request.hold, request.hold.request_id
        amount = rate(usage, hold.pinned).amount
        self.model.beyond_holds += max(0, amount - request.held)
        self.model.charges[name] = (amount, outcome, hold)
        del self.model.open[name]
        fingerprint = hold.context.fingerprint
        if not fingerprint or outcome in PRESUMED:
            return
        if not delivered and amount and request.answered:
            self.model.charges[name] = (0, outcome, hold)
        elif not delivered and amount:
            self.model.undelivered.setdefault(fingerprint, []).append(name)
        elif delivered and hold.context.is_retry:
            self._forgive(fingerprint)

    def _forgive(self, fingerprint):
        for name in self.model.undelivered.pop(fingerprint, ()):
            _, outcome, hold = self.model.charges[name]
            self.model.charges[name] = (0, outcome, hold)
        for request in self.model.open.values():
            request.answered |= request.hold.context.fingerprint == fingerprint


class dying:
    """The process dies before the n-th statement of its transaction."""

    def __init__(self, die_at):
        self.left, self.patch = die_at, pytest.MonkeyPatch()

    def __enter__(self):
        execute = Prepared.execute

        def counted(prepared, cursor, row):
            self.left -= 1
            if self.left == 0:
                raise Killed
            execute(prepared, cursor, row)

        self.patch.setattr(Prepared, "execute", counted)

    def __exit__(self, *_):
        self.patch.undo()


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def check(databases, *, examples):
    run_state_machine_as_test(
        type("Machine", (LedgerMachine,), {"databases": staticmethod(databases)}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=QUIET,
        ),
    )


@pytest.mark.parametrize("examples", [40, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_the_ledger_does_what_the_model_says(tmp_path, examples):
    check(partial(sqlite_file, tmp_path), examples=examples)


@pytest.mark.postgres
@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_two_servers_on_postgresql_do_what_the_model_says(postgres, examples):
    with fresh_database(postgres) as url, ExitStack() as scope:
        stores = [scope.enter_context(closing(open_store(url))) for _ in range(2)]
        check(partial(emptied, stores), examples=examples)
