"""Budgets: the most that a tenant, key, user or tag may spend in a day or month (UTC).

The money gate refuses what would pass one (`billing.gate.limits`). Admins set them, with a row in
the admin trail. The transaction that sets or removes one locks the account, so every hold is either
counted here or checked by the gate. For alerts there are metrics by tenant.
"""

from dataclasses import asdict, replace
from enum import StrEnum

import orjson

from billing.accounts import Accounts
from billing.errors import AlreadyExists, InvalidName, UnknownBudget, UnknownTenant
from billing.gate.limits import EACH, NOTHING, Spending, SpendLimit, period_ns, period_of
from billing.money import format_units
from billing.names import check_name, check_text
from billing.store import accounts as store_accounts
from billing.store import limits as store_limits
from billing.store import reports as store_reports
from billing.store.store import Connection, LedgerStore

_SAME = ("tenant", "per", "of", "value")  # unchanged, what it counted stays


class Of(StrEnum):
    """Whose spending a budget bounds, within its tenant."""

    TENANT = "tenant"
    KEY = "key"
    USER = "user"
    TAG = "tag"


class BudgetSpan(StrEnum):
    """The time in which a budget counts charges."""

    DAY = "day"
    MONTH = "month"


def set_budget(
    accounts: Accounts, budget: SpendLimit, *, by: str, now_ns: int, reason: str
) -> None:
    """Creates a budget, or changes the one of its name.

    A new one first reads its period's entries: 18 s for a million.
    """
    _check(budget)
    accounts.tenant(budget.tenant)
    store = accounts.store
    past: store_limits.Past | None = None
    with store.reading() as connection:
        standing = store_limits.find_limit(connection, budget.name)
        if standing and all(getattr(standing, name) == getattr(budget, name) for name in _SAME):
            wanted = replace(budget, since_ns=standing.since_ns)
        else:
            wanted = replace(budget, since_ns=period_ns(period_of(budget.per, now_ns))[0])
            past = store_limits.Past(wanted)
            past.read(connection)

    def write(connection: Connection) -> None:
        before = store_limits.find_limit(connection, budget.name)
        if before != standing:
            raise AlreadyExists(f"budget {budget.name!r} has just been changed; look at it again")
        if before is not None and before.tenant != budget.tenant:
            raise AlreadyExists(
                f"budget {budget.name!r} limits {before.tenant!r}; remove it first, or choose "
                "another name"
            )
        after = _payload(wanted) | {"entry": str(_lock(store, connection, budget.tenant))}
        was = None if before is None else _payload(before)
        number = accounts.trail.add(connection, by, "budget.set", budget.name, was, after, reason)
        store_limits.put_limit(store, connection, replace(wanted, version=number))
        if past is not None:
            store_limits.replace_spending(connection, _counted(connection, past), budget.name)
        store_limits.mark_limited(connection, [budget.tenant])

    store.retrying(write)
    accounts.refresh()


def remove_budget(accounts: Accounts, name: str, *, by: str, reason: str) -> None:
    """Removes a budget. Raises `UnknownBudget`."""
    store = accounts.store

    def write(connection: Connection) -> None:
        before = store_limits.find_limit(connection, name)
        if before is None:
            raise UnknownBudget(f"there is no budget {name!r}; see `cachesvc tenants budget`")
        after = {"entry": str(_lock(store, connection, before.tenant))}
        store_limits.drop_limit(connection, name)
        accounts.trail.add(connection, by, "budget.remove", name, _payload(before), after, reason)
        store_limits.replace_spending(connection, {}, name)
        store_limits.mark_limited(connection, [before.tenant])

    store.retrying(write)
    accounts.refresh()


def _check(budget: SpendLimit) -> None:
    check_name(budget.name, "budget")
    check_text(budget.value, "value")
    if (budget.of == Of.TENANT) != (not budget.value):
        raise InvalidName(f"a budget for a {budget.of} needs a value; one for a tenant has none")
    if budget.value == EACH and budget.of not in (Of.KEY, Of.USER):
        raise InvalidName(f"the value {EACH!r} is for a budget of every key or every user")


def _lock(store: LedgerStore, connection: Connection, tenant: str) -> int:
    """Locks the account. Returns the number of its last entry."""
    store_accounts.bump_version(store, connection)
    row = store_accounts.tenant_row(connection, tenant, lock=True)
    if row is None:
        raise UnknownTenant(f"tenant {tenant!r} does not exist")
    seq: int = row["seq"]
    return seq


def _counted(connection: Connection, past: store_limits.Past) -> store_limits.Rows:
    """What a new limit counts: charges of its period, and holds. The account is locked."""
    past.read(connection)
    found = {spender: Spending(charged) for spender, charged in past.charged.items()}
    for hold in store_reports.hold_list(connection, past.limit.tenant):
        body = orjson.loads(hold.body)
        spender = past.limit.spender(body, body.get("admitted_ns", 0))
        if spender is not None:
            found[spender] = found.get(spender, NOTHING).plus(0, hold.amount)
    return found


def _payload(limit: SpendLimit) -> dict[str, str]:
    """A budget in the trail, whose number is its version."""
    shown = {name: str(value) for name, value in asdict(limit).items() if name != "version"}
    return shown | {"amount": format_units(limit.amount)}
