"""Budgets: maximum spending of a tenant, key, user or tag in a day or month, and minimum balances.

They send alerts or ask for a top-up. A hard one is a limit too: the money gate refuses what would
pass it (`billing.gate.limits`).

Admins set them, with a row in the admin trail. `BudgetWatch` is called every few seconds, off the
event loop, and reads the entries posted since its last call.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from billing.accounts import Accounts
from billing.alerts.hard_limits import Hardening
from billing.alerts.spending import HourlySpending, Whose
from billing.alerts.topups import TopUpRequests
from billing.errors import AlreadyExists, InvalidAmount, InvalidName, UnknownBudget
from billing.gate.deposits import INCOMING
from billing.gate.limits import EACH
from billing.gate.work import TenantAccount
from billing.money import format_units
from billing.names import check_name, check_text
from billing.prices.book import NS
from billing.store import alerts as rows
from billing.store import reports as store_reports
from billing.store.store import Connection, LedgerStore

ALERT_AT = (80, 100)  # percent of a budget
MOST_A_DAY = 100  # maximum of top-up requests of one budget


class Of(StrEnum):
    """Whose spending a budget bounds, within its tenant."""

    TENANT = "tenant"
    KEY = "key"
    USER = "user"
    TAG = "tag"


class BudgetSpan(StrEnum):
    """What a budget watches.

    A day's or month's charges (UTC), a minimum balance with or without a top-up request, or an hour
    that costs far more than usual.
    """

    DAY = "day"
    MONTH = "month"
    BALANCE = "balance"
    TOPUP = "topup"
    SPIKE = "spike"


PERIODS = (BudgetSpan.DAY, BudgetSpan.MONTH)
_NO_VERSION = {"since_ns": 0, "version": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`value` is the key's id, the user, or the tag as `name=value`; empty for the tenant.

    `ask` is the top-up to request, at most `most` times a day (UTC). `hard`: requests that would
    pass the amount are refused; the value `*` then bounds every key or user by itself.
    """

    name: str
    tenant: str
    amount: int
    span: BudgetSpan = BudgetSpan.MONTH
    of: Of = Of.TENANT
    value: str = ""
    ask: int = 0
    most: int = 0
    hard: bool = False


@dataclass(frozen=True, slots=True)
class BudgetAlert:
    """A message to send once for each `id`."""

    id: str
    type: str
    data: dict[str, Any]


def set_budget(accounts: Accounts, budget: Budget, *, by: str, now_ns: int, reason: str) -> None:
    """Creates a budget, or changes the one of its name.

    A new hard one first reads its period's entries: 18 s for a million.
    """
    _check(budget)
    accounts.tenant(budget.tenant)
    store = accounts.store
    wanted = asdict(budget)
    with store.reading() as connection:
        standing = rows.find_budget(connection, budget.name)
    hardening = Hardening(store, standing, wanted, now_ns)

    def write(connection: Connection) -> None:
        before = rows.find_budget(connection, budget.name)
        if before != standing:
            raise AlreadyExists(f"budget {budget.name!r} has just been changed; look at it again")
        was_hard = before is not None and before["hard"]
        if was_hard and before is not None and before["tenant"] != budget.tenant:
            raise AlreadyExists(
                f"budget {budget.name!r} limits {before['tenant']!r}; remove it first, or choose "
                "another name"
            )
        row = dict(wanted)
        if budget.hard or was_hard:
            row["entry"] = hardening.lock(connection, budget.tenant)
        if budget.hard:
            row["since_ns"] = hardening.since_ns(before, wanted)
        was = None if before is None else _payload(before)
        number = accounts.trail.add(
            connection, by, "budget.set", budget.name, was, _payload(row), reason
        )
        version = {"since_ns": row["since_ns"], "version": number} if budget.hard else _NO_VERSION
        rows.put_budget(store, connection, wanted | version)
        if budget.hard or was_hard:
            hardening.stand(connection, budget.name, budget.tenant)

    store.retrying(write)
    accounts.refresh()


def _check(budget: Budget) -> None:
    check_name(budget.name, "budget")
    check_text(budget.value, "value")
    if (budget.of is Of.TENANT) != (not budget.value):
        raise InvalidName(f"a budget for a {budget.of} needs a value; one for a tenant has none")
    if budget.span in (BudgetSpan.BALANCE, BudgetSpan.TOPUP) and budget.of is not Of.TENANT:
        raise InvalidName("only a tenant has a balance")
    if (budget.span is BudgetSpan.TOPUP) != (budget.ask > 0):
        raise InvalidAmount("only a budget per topup has an amount to ask for, and it needs one")
    if budget.ask and not 1 <= budget.most <= MOST_A_DAY:
        raise InvalidAmount(f"ask for a top-up 1 to {MOST_A_DAY} times a day, not {budget.most}")
    if budget.hard and budget.span not in PERIODS:
        raise InvalidName(f"only a budget per day or month can be hard, not one per {budget.span}")
    if budget.value == EACH and not (budget.hard and budget.of in (Of.KEY, Of.USER)):
        raise InvalidName(f"the value {EACH!r} is for a hard budget of every key or every user")


def remove_budget(accounts: Accounts, name: str, *, by: str, now_ns: int, reason: str) -> None:
    """Removes a budget. Raises `UnknownBudget`."""
    store = accounts.store

    def write(connection: Connection) -> None:
        before = rows.find_budget(connection, name)
        if before is None:
            raise UnknownBudget(f"there is no budget {name!r}; see `cachesvc tenants budget`")
        hardening = Hardening(store, before, None, now_ns) if before["hard"] else None
        after = None
        if hardening is not None:
            after = {"entry": str(hardening.lock(connection, before["tenant"]))}
        rows.drop_budget(connection, name)
        was = _payload(before)
        accounts.trail.add(connection, by, "budget.remove", name, was, after, reason)
        if hardening is not None:
            hardening.stand(connection, name, before["tenant"])

    store.retrying(write)
    accounts.refresh()


def all_budgets(store: LedgerStore) -> list[Budget]:
    with store.reading() as connection:
        return budgets_in(connection)


def budgets_in(connection: Connection) -> list[Budget]:
    return [_budget(row) for row in rows.budget_rows(connection)]


def _payload(row: Any) -> dict[str, str]:
    """A budget in alerts and in the trail, without what it has not."""
    shown = {**{str(k): str(v) for k, v in row.items()}, "amount": format_units(row["amount"])}
    absent = () if row["hard"] else ("hard", "since_ns")
    if row["ask"]:
        shown["ask"] = format_units(row["ask"])
    else:
        absent = (*absent, "ask", "most")
    return {name: value for name, value in shown.items() if name not in (*absent, "version")}


def _budget(row: Any) -> Budget:
    values = {field.name: row[field.name] for field in fields(Budget)}
    return Budget(**values | {"span": BudgetSpan(row["span"]), "of": Of(row["of"])})


class BudgetWatch:
    """Finds budgets that are reached. One thread."""

    def __init__(self, store: LedgerStore) -> None:
        self._store = store
        self._spending: dict[str, HourlySpending] = {}
        self._topups = TopUpRequests()

    def look(self, now_ns: int) -> list[BudgetAlert]:
        """The alerts due now. The same alerts are returned until their period ends."""
        now = datetime.fromtimestamp(now_ns // NS, UTC)
        budgets = all_budgets(self._store)
        with self._store.reading() as connection:
            by_month = _wanted(budgets, PERIODS)
            for tenant, wanted in _wanted(budgets, (*PERIODS, BudgetSpan.SPIKE)).items():
                spending = self._spending.setdefault(tenant, HourlySpending())
                spending.read(connection, tenant, now_ns, wanted, month=tenant in by_month)
            accounts = store_reports.all_accounts(connection) if budgets else {}
            found: list[BudgetAlert] = []
            for budget in budgets:
                account = accounts[budget.tenant]
                if budget.span is BudgetSpan.BALANCE:
                    found += self._low(connection, budget, account.worth, account.currency)
                elif budget.span is BudgetSpan.TOPUP:
                    found += self._to_top_up(connection, budget, account, now_ns)
                elif budget.span is BudgetSpan.SPIKE:
                    found += self._spiked(budget, account.currency)
                else:
                    found += self._spent(budget, now, account.currency)
        return found

    def _spent(self, budget: Budget, now: datetime, currency: str) -> Iterator[BudgetAlert]:
        period = now.strftime("%Y-%m-%d" if budget.span is BudgetSpan.DAY else "%Y-%m")
        spent = self._spending[budget.tenant].within((budget.of, budget.value), period)
        for percent in ALERT_AT:
            if spent * 100 >= budget.amount * percent:
                yield BudgetAlert(
                    f"budget/{budget.name}/{format_units(budget.amount)}/{period}/{percent}",
                    "cachesvc.budget.reached.v1",
                    {
                        **_payload(asdict(budget)),
                        "currency": currency,
                        "period": period,
                        "percent": percent,
                        "spent": format_units(spent),
                    },
                )

    def _spiked(self, budget: Budget, currency: str) -> Iterator[BudgetAlert]:
        """One alert for each hour."""
        found = self._spending[budget.tenant].spike((budget.of, budget.value), budget.amount)
        if found is None:
            return
        hour, spent, usual = found
        began = datetime.fromtimestamp(hour * 3600, UTC).strftime("%Y-%m-%dT%H:%MZ")
        yield BudgetAlert(
            f"spike/{budget.name}/{format_units(budget.amount)}/{began}",
            "cachesvc.spending.spiked.v1",
            {
                **_payload(asdict(budget)),
                "currency": currency,
                "hour": began,
                "spent": format_units(spent),
                "usual": format_units(usual),
            },
        )

    def _low(
        self, connection: Connection, budget: Budget, worth: int, currency: str
    ) -> Iterator[BudgetAlert]:
        """One alert after each payment."""
        if worth >= budget.amount:
            return
        rare = store_reports.rare_entries(connection, budget.tenant)
        last = max((entry.seq for entry in rare if entry.kind in INCOMING), default=0)
        yield BudgetAlert(
            f"balance/{budget.name}/{format_units(budget.amount)}/{last}",
            "cachesvc.balance.low.v1",
            {**_payload(asdict(budget)), "currency": currency, "balance": format_units(worth)},
        )

    def _to_top_up(
        self, connection: Connection, budget: Budget, account: TenantAccount, now_ns: int
    ) -> Iterator[BudgetAlert]:
        """One request each time the balance falls below the budget. Its id is the deposit's
        reference."""
        wanted = self._topups.wanted(
            connection,
            account,
            name=budget.name,
            threshold=budget.amount,
            most=budget.most,
            now_ns=now_ns,
        )
        if wanted is not None:
            payload = _payload(asdict(budget)) | {"currency": account.currency}
            more = {"balance": format_units(account.worth), "reference": wanted}
            yield BudgetAlert(wanted, "cachesvc.topup.wanted.v1", payload | more)


def _wanted(
    budgets: Iterable[Budget], spans: Collection[BudgetSpan]
) -> dict[str, frozenset[Whose]]:
    """The owners whose spending budgets of these spans watch, by tenant."""
    found: dict[str, frozenset[Whose]] = {}
    for each in budgets:
        if each.span in spans:
            found[each.tenant] = found.get(each.tenant, frozenset()) | {(each.of, each.value)}
    return found
