"""Proves a ledger from nothing but its entries and rate cards, and rebuilds what is derived from
them.

Offline and read-only (`verify`); a server may go on beside it. Every named invariant below is
checked for every entry; a tenant's proof ends at its first entry that differs, for what follows
hangs on it.

    gapless     numbers run 1, 2, 3, ... and times never go back
    chained     the hash is that of the entry after the one before it
    balanced    postings name known accounts and sum to zero
    rated       a charge is its usage times its card, in the window of its admission, taken from
                the accounts in their order; what was saved is as said
    corrected   a correction names a charge and gives back no more than is left of it
    projected   account rows and rollups are what the entries and holds sum to
    trailed     the admin trail is chained without a gap
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from billing import store_accounts, store_reports, store_trail
from billing.cards import card_digest, parse_card
from billing.entries import ACCOUNTS, TENANT_ACCOUNTS, Entry, Kind, digest, genesis, parse_postings
from billing.errors import BillingError
from billing.gate import Account, pay_in, refund, spend
from billing.holds import rate_ref
from billing.money import format_units
from billing.prices import PinnedRate, PriceBook, RateRef
from billing.rating import rate
from billing.rollups import DAILY_KEY, Rollups, Row
from billing.store import Connection, LedgerStore
from billing.usage import Usage

Progress = Callable[[int], None]  # called with the number of entries checked


@dataclass(frozen=True, slots=True)
class Problem:
    """The first thing that differs in a tenant's chain, or in a projection (`seq` 0)."""

    tenant: str
    seq: int
    invariant: str
    message: str
    request_id: str = ""

    def __str__(self) -> str:
        where = f"entry {self.seq} of tenant {self.tenant!r}" if self.seq else self.tenant
        request = f" (request {self.request_id!r})" if self.request_id else ""
        return f"{where}{request} is not {self.invariant}: {self.message}"


@dataclass(slots=True)
class Proof:
    """What `verify` found. `heads` are (number, hash) by tenant, to keep elsewhere and compare."""

    num_entries: int = 0
    num_tenants: int = 0
    problems: list[Problem] = field(default_factory=list)
    heads: dict[str, tuple[int, str]] = field(default_factory=dict)
    revenue: dict[str, int] = field(default_factory=dict)  # by currency

    @property
    def ok(self) -> bool:
        return not self.problems


class _Differs(Exception):
    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant


def verify(
    store: LedgerStore,
    *,
    heads: dict[str, tuple[int, str]] | None = None,
    progress: Progress | None = None,
) -> Proof:
    """Recompute every hash, charge, balance and rollup. `heads` kept elsewhere prove that no tail
    was cut off or written anew."""
    with store.reading() as connection:
        proof = Proof()
        book = _book(connection, proof)
        replay = Replay(book, store_reports.corrected_seqs(connection), heads or {})
        for entry in store_reports.stream_entries(connection):
            replay.take(entry)
            proof.num_entries += 1
            if progress is not None and proof.num_entries % store_reports.CHUNK == 0:
                progress(proof.num_entries)
        proof.problems += replay.problems.values()
        proof.problems += _missing_heads(replay, heads or {})
        broken = set(replay.problems)
        stored = store_reports.all_accounts(connection)
        proof.problems += _compare_accounts(replay, stored, connection, broken)
        if not broken:
            proof.problems += _compare_rollups(replay.rollups, connection)
        proof.problems += _check_trail(connection)
        proof.num_tenants = len(stored)
        proof.heads = {name: (a.seq, a.head.hex()) for name, a in replay.accounts.items()}
        for account in replay.accounts.values():
            total = proof.revenue.get(account.currency, 0)
            proof.revenue[account.currency] = total + account.balances["revenue"]
    return proof


def rebuild(store: LedgerStore) -> Proof:
    """Derive balances, holds' sums and rollups again from entries and holds. Changes no entry.

    Raises `BillingError` when the entries themselves do not prove.
    """

    def operation(connection: Connection) -> None:
        stored = store_reports.all_accounts(connection, lock=True)
        proof = Proof()
        replay = Replay(_book(connection, proof), store_reports.corrected_seqs(connection), {})
        for entry in store_reports.stream_entries(connection):
            replay.take(entry)
        for problem in (*proof.problems, *replay.problems.values()):
            raise BillingError(f"nothing was rebuilt: {problem}")
        held = store_reports.held_by_tenant(connection)
        for tenant in stored:
            account = replay.account(tenant, stored[tenant].currency)
            account.held = held.get(tenant, 0)
        daily, sessions = replay.rollups.stored()
        store_reports.replace_projections(connection, replay.accounts.values(), daily, sessions)

    store.retrying(operation)
    return verify(store)


class Replay:
    """Walks entries in order and keeps what they sum to."""

    def __init__(
        self,
        book: PriceBook,
        corrected: set[tuple[str, int]],
        heads: dict[str, tuple[int, str]],
    ) -> None:
        self.book = book
        self.accounts: dict[str, Account] = {}
        self.problems: dict[str, Problem] = {}
        self.rollups = Rollups()
        self._corrected = corrected
        self._heads = heads
        self._charges: dict[tuple[str, int], dict[str, int]] = {}  # what is left of corrected ones
        self._amounts: dict[tuple[str, int], int] = {}
        self._rates: dict[RateRef, PinnedRate] = {}

    def account(self, tenant: str, currency: str) -> Account:
        found = self.accounts.get(tenant)
        if found is None:
            found = Account(tenant, currency, None, False, genesis(tenant))
            self.accounts[tenant] = found
        return found

    def take(self, entry: Entry) -> None:
        """Check one entry and add it; ignores the rest of a chain that has differed."""
        if entry.tenant in self.problems:
            return
        try:
            self._check(entry)
        except _Differs as differs:
            self._report(entry, differs.invariant, str(differs))
        except (BillingError, ValueError, KeyError, TypeError) as error:
            self._report(entry, "readable", f"{type(error).__name__}: {error}")

    def _report(self, entry: Entry, invariant: str, message: str) -> None:
        self.problems[entry.tenant] = Problem(
            entry.tenant, entry.seq, invariant, message, entry.request_id
        )

    def _check(self, entry: Entry) -> None:
        account = self.account(entry.tenant, entry.currency)
        if entry.seq != account.seq + 1:
            raise _Differs("gapless", f"it follows entry {account.seq}")
        if entry.at_ns < account.at_ns:
            raise _Differs("gapless", "it is dated before the entry before it")
        head = digest(
            account.head,
            entry.tenant,
            entry.seq,
            entry.kind,
            entry.request_id,
            entry.at_ns,
            entry.currency,
            entry.postings,
            entry.body,
        )
        if head != entry.hash:
            raise _Differs("chained", f"its hash is {entry.hash.hex()}, not {head.hex()}")
        expected = self._heads.get(entry.tenant)
        if expected is not None and expected[0] == entry.seq and expected[1] != head.hex():
            raise _Differs("chained", f"its hash was {expected[1]} when that was written down")
        if entry.currency != account.currency:
            raise _Differs("balanced", f"its currency is {entry.currency}")
        postings = parse_postings(entry.postings)
        self._check_kind(entry, account, postings)
        account.head, account.seq, account.at_ns = head, entry.seq, entry.at_ns
        for name, units in postings.items():
            account.balances[name] += units

    def _check_kind(self, entry: Entry, account: Account, postings: dict[str, int]) -> None:
        details = entry.details
        if entry.kind == Kind.CHARGE:
            self._check_charge(entry, account, postings, details)
        elif entry.kind == Kind.CORRECTION:
            self._check_correction(entry, account, postings, details)
        elif entry.kind in (Kind.GRANT, Kind.TOPUP):
            amount = entry.amount
            paid = {"granted": amount, "promotion": -amount}
            if entry.kind == Kind.TOPUP:
                paid = {**pay_in(account, amount), "cash": -amount}
            _same("balanced", postings, paid)
        else:
            raise _Differs("readable", f"{entry.kind!r} is no kind of entry")

    def _check_charge(
        self, entry: Entry, account: Account, postings: dict[str, int], details: dict[str, Any]
    ) -> None:
        pinned = self._pinned(rate_ref(details))
        charge = rate(Usage.from_record(details.get("usage", {})), pinned)
        if pinned.currency != entry.currency:
            raise _Differs("rated", f"its card is in {pinned.currency}")
        _same("rated", postings, spend(account, charge.amount))
        if int(details["saved"]) != charge.saved:
            raise _Differs("rated", f"it saved {charge.saved} units, not {details['saved']}")
        self._check_window(pinned.ref, details.get("admitted_ns", 0))
        self.rollups.add(entry, details)
        key = (entry.tenant, entry.seq)
        if key in self._corrected:
            self._charges[key] = {name: -postings.get(name, 0) for name in TENANT_ACCOUNTS}
            self._amounts[key] = charge.amount

    def _check_window(self, ref: RateRef, admitted_ns: int) -> None:
        card = self.book.card(ref.card, ref.version)
        window = card.window_at(admitted_ns) if card.windows and admitted_ns else ref.window
        if window != ref.window:
            raise _Differs("rated", f"it was admitted in window {window!r}, not {ref.window!r}")

    def _check_correction(
        self, entry: Entry, account: Account, postings: dict[str, int], details: dict[str, Any]
    ) -> None:
        key = (entry.tenant, details["corrects"])
        taken = self._charges.get(key)
        if taken is None:
            raise _Differs("corrected", f"entry {details['corrects']} is no charge before it")
        amount = postings.get("revenue", 0)
        if "usage" in details or "card" in details:
            usage = Usage.from_record(details.get("usage", {}))
            charge = rate(usage, self._pinned(rate_ref(details)))
            if amount != charge.amount - self._amounts[key]:
                raise _Differs("corrected", "it is not the difference of the two usages")
        if amount < 0 and -amount > sum(taken.values()):
            raise _Differs("corrected", f"it gives back more than the {sum(taken.values())} left")
        due = spend(account, amount) if amount > 0 else refund(account, taken, -amount)
        _same("corrected", postings, due)
        for name in TENANT_ACCOUNTS:
            taken[name] -= postings.get(name, 0)

    def _pinned(self, ref: RateRef) -> PinnedRate:
        found = self._rates.get(ref)
        if found is None:
            found = self._rates[ref] = self.book.pinned(ref)
        return found


def _same(invariant: str, found: dict[str, int], expected: dict[str, int]) -> None:
    for name in ACCOUNTS:
        if found.get(name, 0) != expected.get(name, 0):
            raise _Differs(
                invariant,
                f"it moves {format_units(found.get(name, 0))} on {name}, "
                f"and {format_units(expected.get(name, 0))} is right",
            )


def _book(connection: Connection, proof: Proof) -> PriceBook:
    """The applied cards; a card whose text is not what was applied is a problem of its own."""
    cards = []
    for row in store_accounts.card_rows(connection):
        card = parse_card(row["text"])
        cards.append(card)
        if card_digest(card) != row["digest"] or (card.name, card.version) != (
            row["name"],
            row["version"],
        ):
            name = f"rate card {row['name']} {row['version']}"
            proof.problems.append(Problem(name, 0, "rated", "its text was changed"))
    return PriceBook(tuple(cards))


def _missing_heads(replay: Replay, heads: dict[str, tuple[int, str]]) -> Iterator[Problem]:
    for tenant, (seq, _) in heads.items():
        account = replay.accounts.get(tenant)
        ends = account.seq if account else 0
        if tenant not in replay.problems and ends < seq:
            yield Problem(tenant, seq, "gapless", f"it was written down, and now {ends} is last")


def _compare_accounts(
    replay: Replay, stored: dict[str, Account], connection: Connection, broken: set[str]
) -> Iterator[Problem]:
    held = store_reports.held_by_tenant(connection)
    for tenant in sorted(replay.accounts.keys() - stored.keys() - broken):
        yield Problem(tenant, 0, "projected", "it has entries and no account")
    for tenant in sorted(stored.keys() - broken):
        row = stored[tenant]
        proven = replay.account(tenant, row.currency)
        facts = [
            ("seq", row.seq, proven.seq),
            ("head", row.head.hex(), proven.head.hex()),
            ("currency", row.currency, proven.currency),
            ("held", row.held, held.get(tenant, 0)),
            *((name, row.balances[name], proven.balances[name]) for name in ACCOUNTS),
        ]
        for name, found, expected in facts:
            if found != expected:
                message = f"{name} is {found}, and the entries and holds make {expected}"
                yield Problem(f"account {tenant!r}", 0, "projected", message)
                break


def _compare_rollups(rollups: Rollups, connection: Connection) -> Iterator[Problem]:
    expected_daily, expected_sessions = rollups.rows()
    found = _keyed(store_reports.daily(connection, None), DAILY_KEY)
    yield from _differences("usage_daily", found, _keyed(expected_daily, DAILY_KEY))
    key = ("tenant", "session")
    found = _keyed(store_reports.all_sessions(connection), key)
    yield from _differences("usage_sessions", found, _keyed(expected_sessions, key))


def _keyed(rows: Iterable[Row], key: tuple[str, ...]) -> dict[tuple[Any, ...], Row]:
    return {tuple(row[name] for name in key): row for row in rows}


def _differences(
    table: str, found: dict[tuple[Any, ...], Row], expected: dict[tuple[Any, ...], Row]
) -> Iterator[Problem]:
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            where = "/".join(map(str, key))
            yield Problem(f"{table} {where}", 0, "projected", "it is not the sum of its charges")
            return


def _check_trail(connection: Connection) -> Iterator[Problem]:
    head, last = store_trail.TRAIL_GENESIS, 0
    for row in store_trail.trail_rows(connection):
        head = store_trail.trail_hash(head, row)
        if row["seq"] != last + 1 or row["hash"] != head:
            yield Problem(f"trail entry {row['seq']}", 0, "trailed", "it differs from its hash")
            return
        last = row["seq"]
