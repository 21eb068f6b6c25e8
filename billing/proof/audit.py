"""Proves a ledger from nothing but its entries and rate cards, and rebuilds what is derived from
them.

Offline and read-only (`verify`); a server may go on beside it. Every named invariant below is
checked for every entry; a tenant's proof ends at its first entry that differs, for what follows
hangs on it.

    gapless     numbers run 1, 2, 3, ... and times never go back
    chained     the hash is that of the entry after the one before it
    balanced    postings name known accounts and sum to zero
    rated       a charge is its usage times the card in force at its admission, in that window,
                taken from the accounts in their order; what was saved is as said
    billed      a charge belongs to the month of its admission
    corrected   a correction names a charge and gives back no more than is left of it; an
                adjustment names a deposit
    decided     whatever a person booked is in the admin trail, and the other way round
    issued      invoices are what the admin trail says, numbered without a gap
    projected   account rows and rollups are what the entries and holds sum to
    readable    every row says something
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from billing.errors import BillingError
from billing.gate.corrections import OWN_REFERENCES
from billing.gate.deposits import INCOMING
from billing.gate.entries import (
    ACCOUNTS,
    CORRECTING,
    TENANT_ACCOUNTS,
    Entry,
    Kind,
    digest,
    genesis,
    parse_postings,
)
from billing.gate.grants import NEVER, Grant, expires_ns_of, remaining
from billing.gate.holds import StoredHold, decode_request, rate_ref
from billing.gate.postings import deposited, refund, spend
from billing.gate.rollups import DAILY_KEY, Rollups, Row
from billing.gate.work import SYSTEM, TenantAccount
from billing.money import format_units
from billing.prices.book import ABOVE, AND, PinnedRate, PriceBook, RateCard, RateRef, Terms
from billing.prices.cards import card_digest, parse_card
from billing.prices.rating import rate
from billing.proof.decisions import Decisions, check_decisions
from billing.proof.history import CardHistory
from billing.proof.invoices import check_invoices
from billing.proof.result import UNREADABLE, Head, Problem, Proof, readable
from billing.proof.trail import TRAIL, check_trail, trail_head
from billing.store import accounts as store_accounts
from billing.store import expiring as store_expiring
from billing.store import reports as store_reports
from billing.store.store import Connection, LedgerStore
from billing.usage import Usage

Heads = dict[str, Head]  # by tenant, and of the admin trail
KeptHeads = dict[str, dict[int, set[str]]]  # the same by number: several states of a ledger
Progress = Callable[[int], None]  # called with the number of entries checked
DEPOSITS = (*INCOMING, Kind.WITHDRAWAL, Kind.CHARGEBACK)


class _Differs(Exception):
    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant


def verify(
    store: LedgerStore,
    *,
    heads: Heads | Sequence[Heads] = (),
    progress: Progress | None = None,
) -> Proof:
    """Recompute every hash, charge, balance and rollup. `heads` kept elsewhere, one state of them
    or several, prove that no tail was cut off or written anew."""
    kept = _by_number(heads)
    with store.reading() as connection:
        proof = Proof()
        book = _book(connection, proof)
        corrections = store_reports.correction_rows(connection)
        replay = ProofRun(book, corrections, kept, _history(connection, book))
        for entry in store_reports.stream_entries(connection):
            replay.take(entry)
            proof.num_entries += 1
            if progress is not None and proof.num_entries % store_reports.CHUNK == 0:
                progress(proof.num_entries)
        proof.problems += replay.problems.values()
        proof.problems += _missing_heads(replay, kept)
        proof.problems += readable("holds", lambda: _check_holds(book, connection))
        broken = set(replay.problems)
        proof.problems += readable("accounts", lambda: _compare_accounts(replay, connection))
        if not broken:
            rollups = replay.rollups
            proof.problems += readable("usage", lambda: _compare_rollups(rollups, connection))
            proof.problems += readable("expiring", lambda: _compare_expiring(replay, connection))
        known = kept.get(TRAIL, {})
        proof.problems += readable(TRAIL, lambda: check_trail(connection, known))
        proof.problems += readable("invoices", lambda: check_invoices(connection))
        if not broken:
            decisions = replay.decisions
            proof.problems += readable(TRAIL, lambda: check_decisions(connection, decisions))
        proof.num_tenants = len(replay.accounts)
        proof.heads = {name: (a.seq, a.head.hex()) for name, a in replay.accounts.items()}
        proof.heads[TRAIL] = trail_head(connection)
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
        corrections = store_reports.correction_rows(connection)
        book = _book(connection, proof)
        replay = ProofRun(book, corrections, {}, _history(connection, book))
        for entry in store_reports.stream_entries(connection):
            replay.take(entry)
        for problem in (*proof.problems, *replay.problems.values()):
            raise BillingError(f"nothing was rebuilt: {problem}")
        held = store_reports.held_by_tenant(connection)
        for tenant in stored:
            account = replay.account(tenant, stored[tenant].currency)
            account.held = held.get(tenant, 0)
        daily, sessions = replay.rollups.stored()
        store_expiring.write_expiring(connection, replay.expiring())
        store_reports.replace_projections(connection, replay.accounts.values(), daily, sessions)

    store.retrying(operation)
    return verify(store)


class ProofRun:
    """Walks entries in order and keeps what they sum to."""

    def __init__(
        self,
        book: PriceBook,
        corrections: dict[tuple[str, int], int],
        heads: KeptHeads,
        history: "CardHistory",
    ) -> None:
        self.book = book
        self._history = history
        self.accounts: dict[str, TenantAccount] = {}
        self.problems: dict[str, Problem] = {}
        self.rollups = Rollups()
        self._corrections = corrections
        self._corrected = {(tenant, seq) for (tenant, _), seq in corrections.items()}
        self._heads = heads
        self._charges: dict[tuple[str, int], dict[str, int]] = {}  # what is left of corrected ones
        self._amounts: dict[tuple[str, int], int] = {}
        self._deposits: dict[tuple[str, int], tuple[Kind, int]] = {}  # of those put right
        self.grants: dict[str, dict[int, Grant]] = {}  # by tenant and number
        self.decisions = Decisions()
        self._rates: dict[RateRef, PinnedRate] = {}

    def account(self, tenant: str, currency: str) -> TenantAccount:
        found = self.accounts.get(tenant)
        if found is None:
            found = TenantAccount(tenant, currency, None, False, genesis(tenant))
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
        except UNREADABLE as error:
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
        others = self._heads.get(entry.tenant, {}).get(entry.seq, set()) - {head.hex()}
        if others:
            said = " and ".join(sorted(others))
            raise _Differs("chained", f"its hash was {said} when that was written down")
        if entry.currency != account.currency:
            raise _Differs("balanced", f"its currency is {entry.currency}")
        postings = parse_postings(entry.postings)
        details = entry.details
        self._check_kind(entry, account, postings, details)
        copy = self._corrections.get((entry.tenant, entry.seq))
        if copy != (details["corrects"] if entry.kind in CORRECTING else None):
            raise _Differs("corrected", f"it is found by {copy} as what it corrects")
        if entry.billed_ns != details.get("billed_ns"):
            raise _Differs("billed", f"it is found by {entry.billed_ns} as when it is billed")
        if entry.kind != Kind.CHARGE and entry.moment_ns > entry.at_ns:
            raise _Differs("billed", "it is billed after it was made")
        self.decisions.take(entry, details)
        account.head, account.seq, account.at_ns = head, entry.seq, entry.at_ns
        for name, units in postings.items():
            account.balances[name] += units

    def _check_kind(
        self,
        entry: Entry,
        account: TenantAccount,
        postings: dict[str, int],
        details: dict[str, Any],
    ) -> None:
        if entry.kind == Kind.CHARGE:
            self._check_charge(entry, account, postings, details)
        elif entry.kind == Kind.CORRECTION:
            self._check_correction(entry, account, postings, details)
        elif entry.kind == Kind.ADJUSTMENT:
            self._check_adjustment(entry, account, postings, details)
        elif entry.kind == Kind.EXPIRY:
            self._check_expiry(entry, account, postings, details)
        elif entry.kind in DEPOSITS:
            self._check_deposit(entry, account, postings)
        else:
            raise _Differs("readable", f"{entry.kind!r} is no kind of entry")

    def _check_deposit(
        self, entry: Entry, account: TenantAccount, postings: dict[str, int]
    ) -> None:
        gains = entry.kind in INCOMING
        if gains != (entry.amount > 0):
            raise _Differs("balanced", f"a {entry.kind} cannot be {format_units(entry.amount)}")
        if entry.kind == Kind.WITHDRAWAL and account.balances["topup"] + entry.amount < 0:
            raise _Differs("balanced", "it pays out more than was paid in and is left")
        _same("balanced", postings, deposited(account, Kind(entry.kind), entry.amount))
        if entry.kind == Kind.GRANT:
            grant = Grant(entry.seq, entry.request_id, entry.amount, expires_ns_of(entry))
            self.grants.setdefault(entry.tenant, {})[entry.seq] = grant
        elif "expires_ns" in entry.details:
            raise _Differs("balanced", f"a {entry.kind} does not expire")
        if (entry.tenant, entry.seq) in self._corrected:
            self._deposits[entry.tenant, entry.seq] = Kind(entry.kind), entry.amount

    def _check_adjustment(
        self,
        entry: Entry,
        account: TenantAccount,
        postings: dict[str, int],
        details: dict[str, Any],
    ) -> None:
        key = (entry.tenant, details["corrects"])
        kind, stands = self._deposits.get(key, (None, 0))
        if kind not in INCOMING:
            raise _Differs("corrected", f"entry {details['corrects']} is no deposit before it")
        if stands + entry.amount < 0:
            raise _Differs("corrected", "it takes more from a deposit than there was")
        _same("corrected", postings, deposited(account, kind, entry.amount))
        self._deposits[key] = kind, stands + entry.amount
        if kind is Kind.GRANT:
            self.grants[entry.tenant][details["corrects"]].amount += entry.amount

    def _check_expiry(
        self,
        entry: Entry,
        account: TenantAccount,
        postings: dict[str, int],
        details: dict[str, Any],
    ) -> None:
        grants = self.grants.get(entry.tenant, {})
        grant = grants.get(details["corrects"])
        if grant is None or grant.is_over:
            raise _Differs("corrected", f"entry {details['corrects']} is no grant that stands")
        if entry.request_id != grant.reference or entry.at_ns < grant.expires_ns:
            raise _Differs("corrected", f"grant {grant.reference!r} had not expired")
        left = remaining(grants.values(), account.balances["granted"])[grant.seq]
        _same("corrected", postings, {"granted": -left, "promotion": left})
        grant.is_over = True

    def expiring(self) -> set[tuple[str, int, str, int]]:
        """The grants that expire and have not."""
        return {
            (tenant, grant.seq, grant.reference, grant.expires_ns)
            for tenant, grants in self.grants.items()
            for grant in grants.values()
            if grant.expires_ns != NEVER and not grant.is_over
        }

    def _check_charge(
        self,
        entry: Entry,
        account: TenantAccount,
        postings: dict[str, int],
        details: dict[str, Any],
    ) -> None:
        pinned = self._pinned(rate_ref(details))
        charge = rate(Usage.from_record(details.get("usage", {})), pinned)
        if pinned.currency != entry.currency:
            raise _Differs("rated", f"its card is in {pinned.currency}")
        _same("rated", postings, spend(account, charge.amount))
        if int(details["saved"]) != charge.saved:
            raise _Differs("rated", f"it saved {charge.saved} units, not {details['saved']}")
        if int(details.get("fees", 0)) != charge.fees:
            raise _Differs("rated", f"its fees are {charge.fees} units")
        admitted_ns = details.get("admitted_ns", 0)
        if entry.billed_ns not in (None, admitted_ns):
            raise _Differs("billed", "it is not billed by its admission")
        if admitted_ns:
            self._check_card(entry, pinned.ref, admitted_ns)
            self._check_terms(entry, details, pinned.ref, admitted_ns)
        self.rollups.add(entry, details)
        key = (entry.tenant, entry.seq)
        if key in self._corrected:
            self._charges[key] = {name: -postings.get(name, 0) for name in TENANT_ACCOUNTS}
            self._amounts[key] = charge.amount

    def _check_terms(
        self, entry: Entry, details: dict[str, Any], ref: RateRef, admitted_ns: int
    ) -> None:
        """Window, group and length are the request's; a service tier is what it asked for."""
        card = self.book.card(ref.card, ref.version)
        first, *factors = ref.window.split(AND)
        service = next((name for name in factors if name in card.services), "")
        named = int(first.removeprefix(ABOVE)) if first.startswith(ABOVE) else 0
        usage = Usage.from_record(details.get("usage", {}))
        if usage.prompt and details["outcome"] == "finished" and usage.prompt <= named:
            raise _Differs("rated", f"its prompt of {usage.prompt} tokens is not above {named}")
        terms = Terms(tenant=entry.tenant, prompt_tokens=named + 1 if named else 0, service=service)
        window = card.window_for(ref.model, admitted_ns, terms)
        if window != ref.window:
            raise _Differs("rated", f"it was admitted in window {window!r}, not {ref.window!r}")

    def _check_card(self, entry: Entry, ref: RateRef, admitted_ns: int) -> None:
        """The card is the one that was in force, and known, at the admission."""
        seen = self._history.at(ref.model, admitted_ns, entry.currency, entry.tenant)
        if (ref.card, ref.version) not in seen:
            named = " or ".join(f"{name} {version}" for name, version in sorted(seen)) or "none"
            raise _Differs(
                "rated",
                f"it is rated by card {ref.card} {ref.version}, and {named} was in force when it "
                "was admitted",
            )

    def _check_correction(
        self,
        entry: Entry,
        account: TenantAccount,
        postings: dict[str, int],
        details: dict[str, Any],
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
        elif details.get("by") == SYSTEM:
            own = entry.request_id.startswith(OWN_REFERENCES)
            if not own or -amount != sum(taken.values()):
                raise _Differs("corrected", "the server gives back a charge whole, or not at all")
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
    cards: list[RateCard] = []
    for row in store_accounts.card_rows(connection):
        name = f"rate card {row['name']} {row['version']}"
        proof.problems += readable(name, partial(_read_card, row, name, cards))
    return PriceBook(tuple(cards))


def _history(connection: Connection, book: PriceBook) -> CardHistory:
    applied = {
        (row["name"], row["version"]): row["applied_ns"]
        for row in store_accounts.card_rows(connection)
    }
    return CardHistory(book, applied)


def _read_card(row: Any, name: str, cards: list[RateCard]) -> Iterator[Problem]:
    card = parse_card(row["text"])
    cards.append(card)
    said = (row["digest"], row["name"], row["version"])
    if (card_digest(card), card.name, card.version) != said:
        yield Problem(name, 0, "rated", "its text was changed")


def _by_number(heads: Heads | Sequence[Heads]) -> KeptHeads:
    kept: KeptHeads = {}
    for each in [heads] if isinstance(heads, dict) else heads:
        for name, (seq, written) in each.items():
            kept.setdefault(name, {}).setdefault(seq, set()).add(written)
    return kept


def _missing_heads(replay: ProofRun, heads: KeptHeads) -> Iterator[Problem]:
    for tenant, by_number in heads.items():
        if tenant == TRAIL:
            continue
        seq = max(by_number)
        account = replay.accounts.get(tenant)
        ends = account.seq if account else 0
        if tenant not in replay.problems and ends < seq:
            yield Problem(tenant, seq, "gapless", f"it was written down, and now {ends} is last")


def _compare_accounts(replay: ProofRun, connection: Connection) -> Iterator[Problem]:
    broken = replay.problems.keys()
    stored = store_reports.all_accounts(connection)
    held = store_reports.held_by_tenant(connection)
    for tenant in sorted(replay.accounts.keys() - stored.keys() - broken):
        yield Problem(tenant, 0, "projected", "it has entries and no account")
    for tenant in sorted(stored.keys() - broken):
        row = stored[tenant]
        proven = replay.account(tenant, row.currency)
        facts = [
            ("seq", row.seq, proven.seq),
            ("at_ns", row.at_ns, proven.at_ns),
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


def _check_holds(book: PriceBook, connection: Connection) -> Iterator[Problem]:
    """Each says enough to be settled by."""
    for hold in store_reports.hold_list(connection):
        name = f"hold {hold.request_id!r} of tenant {hold.tenant!r}"
        yield from readable(name, partial(_check_hold, hold, book))


def _check_hold(hold: StoredHold, book: PriceBook) -> Iterable[Problem]:
    ref, _ = decode_request(hold.body)
    book.pinned(ref)
    return ()


def _compare_rollups(rollups: Rollups, connection: Connection) -> Iterator[Problem]:
    expected_daily, expected_sessions = rollups.rows()
    found = _keyed(store_reports.daily(connection, None), DAILY_KEY)
    yield from _differences("usage_daily", found, _keyed(expected_daily, DAILY_KEY))
    key = ("tenant", "session")
    found = _keyed(store_reports.all_sessions(connection), key)
    yield from _differences("usage_sessions", found, _keyed(expected_sessions, key))


def _compare_expiring(replay: ProofRun, connection: Connection) -> Iterator[Problem]:
    found, expected = store_expiring.expiring_rows(connection), replay.expiring()
    for tenant, seq, *_ in sorted(found ^ expected)[:1]:
        yield Problem(f"expiring {tenant}/{seq}", 0, "projected", "it is not as its grant says")


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
