"""Proves a ledger from its entries and rate cards alone, and rebuilds derived tables.

`verify` is offline and read-only; a server may run meanwhile. Every invariant below is checked for
every entry. A tenant's proof ends at its first entry that differs, because later ones depend on it.

    gapless     numbers run 1, 2, 3, ... and times never go back
    once        a request is charged once, and a reference booked once
    chained     the hash is that of the entry after the one before it
    balanced    postings name known accounts and sum to zero
    rated       a charge is its usage times the card in force at its admission, in that window,
                taken from the accounts in their order; what was saved is as said
    billed      a charge belongs to the month of its admission
    limited     what was spent and held never passed a hard limit when a hold was checked, and each
                hold was
    corrected   a correction names a charge and gives back no more than is left of it; an
                adjustment names a deposit
    decided     whatever a person booked is in the admin trail, and the other way round
    projected   account rows and rollups are what the entries and holds sum to
    readable    every row says something
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from billing.errors import BillingError
from billing.prices.book import PriceBook, RateCard
from billing.prices.cards import applied_card, card_digest
from billing.proof.decisions import check_decisions
from billing.proof.projections import (
    check_holds,
    compare_accounts,
    compare_expiring,
    compare_rollups,
    compare_spending,
)
from billing.proof.replay import KeptHeads, ProofRun
from billing.proof.result import UNREADABLE, Head, Problem, Proof, readable
from billing.proof.trail import TRAIL, check_trail, trail_head
from billing.store import accounts as store_accounts
from billing.store import expiring as store_expiring
from billing.store import limits as store_limits
from billing.store import reports as store_reports
from billing.store import trail as store_trail
from billing.store.store import Connection, LedgerStore

Heads = dict[str, Head]  # by tenant, and the admin trail's
Progress = Callable[[int], None]  # called with the number of entries checked


def verify(
    store: LedgerStore,
    *,
    heads: Heads | Sequence[Heads] = (),
    progress: Progress | None = None,
) -> Proof:
    """Recomputes every hash, charge, balance and rollup.

    `heads` stored elsewhere, of one or several states of the ledger, prove that no tail was cut off
    or rewritten.
    """
    kept = _by_number(heads)
    with store.reading() as connection:
        proof = Proof()
        book = _book(connection, proof)
        replay = _replay(connection, book, kept)
        for entry in store_reports.stream_entries(connection):
            replay.take(entry)
            proof.num_entries += 1
            if progress is not None and proof.num_entries % store_reports.CHUNK == 0:
                progress(proof.num_entries)
        proof.problems += replay.problems.values()
        proof.problems += readable("limits", replay.limits.problems)
        proof.problems += _missing_heads(replay, kept)
        proof.problems += readable("entries", lambda: _repeated(connection))
        proof.problems += readable("holds", lambda: check_holds(book, connection))
        broken = set(replay.problems)
        proof.problems += readable("accounts", lambda: compare_accounts(replay, connection))
        if not broken:
            rollups = replay.rollups
            proof.problems += readable("usage", lambda: compare_rollups(rollups, connection))
            proof.problems += readable("expiring", lambda: compare_expiring(replay, connection))
            proof.problems += readable("limits", lambda: compare_spending(replay, connection))
        known = kept.get(TRAIL, {})
        proof.problems += readable(TRAIL, lambda: check_trail(connection, known))
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
    """Rebuilds balances, holds' sums and rollups from entries and holds. Changes no entry.

    Raises `BillingError` if the entries themselves cannot be proved.
    """

    def operation(connection: Connection) -> None:
        stored = store_reports.all_accounts(connection, lock=True)
        proof = Proof()
        replay = _replay(connection, _book(connection, proof), {})
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
        store_limits.replace_spending(connection, replay.limits.spending())
        store_limits.mark_limited(connection)
        store_reports.replace_projections(connection, replay.accounts.values(), daily, sessions)

    store.retrying(operation)
    return verify(store)


def _replay(connection: Connection, book: PriceBook, kept: KeptHeads) -> ProofRun:
    try:
        holds = store_reports.hold_list(connection)
    except UNREADABLE:  # `check_holds` says so
        holds = []
    return ProofRun(
        book,
        store_reports.correction_rows(connection),
        kept,
        store_trail.trail_rows(connection),
        holds,
    )


def _book(connection: Connection, proof: Proof) -> PriceBook:
    """The applied cards. A card whose text has changed since is a problem of its own."""
    cards: list[RateCard] = []
    for row in store_accounts.card_rows(connection):
        name = f"rate card {row['name']} {row['version']}"
        proof.problems += readable(name, partial(_read_card, row, name, cards))
    return PriceBook(tuple(cards))


def _repeated(connection: Connection) -> Iterator[Problem]:
    for tenant, kind, request_id, seq in store_reports.repeated(connection):
        message = f"another {kind} has the same id"
        yield Problem(tenant, seq, "once", message, request_id)


def _read_card(row: Any, name: str, cards: list[RateCard]) -> Iterator[Problem]:
    card = applied_card(row)
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
            yield Problem(tenant, seq, "gapless", f"a recorded head names it, but {ends} is last")
