"""Compares the stored derived tables with the sums of the entries.

These are accounts, rollups and the list of expiring grants. Holds are checked too.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from billing.gate.entries import ACCOUNTS
from billing.gate.holds import StoredHold, decode_request
from billing.gate.rollups import DAILY_KEY, Rollups, Row
from billing.prices.book import PriceBook
from billing.proof.replay import ProofRun
from billing.proof.result import Problem, readable
from billing.store import expiring as store_expiring
from billing.store import limits as store_limits
from billing.store import reports as store_reports
from billing.store.store import Connection


def compare_accounts(replay: ProofRun, connection: Connection) -> Iterator[Problem]:
    broken = replay.problems.keys()
    stored = store_reports.all_accounts(connection)
    held = store_reports.held_by_tenant(connection)
    for tenant in sorted(replay.accounts.keys() - stored.keys() - broken):
        yield Problem(tenant, 0, "projected", "it has entries but no account")
    for tenant in sorted(stored.keys() - broken):
        row = stored[tenant]
        proven = replay.account(tenant, row.currency)
        facts = [
            ("seq", row.seq, proven.seq),
            ("at_ns", row.at_ns, proven.at_ns),
            ("head", row.head.hex(), proven.head.hex()),
            ("currency", row.currency, proven.currency),
            ("held", row.held, held.get(tenant, 0)),
            ("limited", row.limited, replay.limits.limited(tenant)),
            *((name, row.balances[name], proven.balances[name]) for name in ACCOUNTS),
        ]
        for name, found, expected in facts:
            if found != expected:
                message = f"{name} is {found}; by the entries and holds it is {expected}"
                yield Problem(f"account {tenant!r}", 0, "projected", message)
                break


def check_holds(book: PriceBook, connection: Connection) -> Iterator[Problem]:
    """Checks that every hold can be settled."""
    for hold in store_reports.hold_list(connection):
        name = f"hold {hold.request_id!r} of tenant {hold.tenant!r}"
        yield from readable(name, partial(_check_hold, hold, book))


def _check_hold(hold: StoredHold, book: PriceBook) -> Iterable[Problem]:
    ref, _ = decode_request(hold.body)
    book.pinned(ref)
    return ()


def compare_rollups(rollups: Rollups, connection: Connection) -> Iterator[Problem]:
    expected_daily, expected_sessions = rollups.rows()
    found = _keyed(store_reports.daily(connection, None), DAILY_KEY)
    yield from _differences("usage_daily", found, _keyed(expected_daily, DAILY_KEY))
    key = ("tenant", "session")
    found = _keyed(store_reports.sessions(connection), key)
    yield from _differences("usage_sessions", found, _keyed(expected_sessions, key))


def compare_spending(replay: ProofRun, connection: Connection) -> Iterator[Problem]:
    rows = store_limits.spending_rows(connection)
    found = {spender: spending for spender, spending in rows.items() if any(spending)}
    for spender, _ in sorted(found.items() ^ replay.limits.spending().items())[:1]:
        where = "/".join(spender)
        message = "it differs from its charges and holds"
        yield Problem(f"spending {where}", 0, "projected", message)


def compare_expiring(replay: ProofRun, connection: Connection) -> Iterator[Problem]:
    found, expected = store_expiring.expiring_rows(connection), replay.expiring()
    for tenant, seq, *_ in sorted(found ^ expected)[:1]:
        yield Problem(f"expiring {tenant}/{seq}", 0, "projected", "it differs from its grant")


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
