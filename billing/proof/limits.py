"""Checks hard limits: what was spent and held when each hold was checked, and that each was.

The admin trail says which limits stood after which entry. A charge says after which entry its hold
was last checked, under which decisions, and how much was held. So for each check the charges before
it and the holds that stood then are known, and together they do not exceed the limit. Holds that
were raised or given without a check since count only as their charges.

Used by `billing.proof.replay`, in the order of the entries.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from billing.gate.entries import Entry
from billing.gate.holds import StoredHold
from billing.gate.limits import NOTHING, Spender, Spending, SpendLimit
from billing.gate.rollups import STORED
from billing.money import format_units, parse_units
from billing.proof.booked import Booked, Differs
from billing.proof.history import LAG_NS
from billing.proof.result import Problem, readable
from billing.proof.trail import TRAIL

OPEN = 2**63  # the number of a charge that is yet to come

_Owner = tuple[str, Spender]  # what it is (tenant, key, user or tag), and who


@dataclass(slots=True)
class _Standing:
    """One decision: a limit stood after entry `begins` until after entry `ends`."""

    limit: SpendLimit
    set_ns: int
    begins: int
    ends: int | None = None


@dataclass(frozen=True, slots=True)
class _Checked:
    """A hold of `held` units was checked after entry `at`; entry `ends` is its charge."""

    at: int
    version: int
    ends: int
    held: int
    request_id: str


@dataclass(slots=True)
class _Spent:
    """What one owner was charged, by entry, and the checks of its holds."""

    charges: list[tuple[int, int]] = field(default_factory=list)
    checks: list[_Checked] = field(default_factory=list)


class LimitChecks:
    """The limits of the admin trail, and one tenant's spending at a time."""

    def __init__(
        self,
        trail: Iterable[Mapping[Any, Any]],
        holds: Iterable[StoredHold],
        corrected: set[tuple[str, int]],
    ) -> None:
        self._decisions: dict[int, _Standing] = {}  # by number in the trail
        self._of: dict[str, list[_Standing]] = {}  # by tenant
        self._problems = readable(TRAIL, lambda: self._read(trail))
        self._holds = [hold for hold in holds if hold.tenant in self._of]
        self._corrected = corrected
        self._owners: dict[int, set[_Owner]] = {}  # of charges that later entries correct
        self._tenant = ""
        self._spent: dict[_Owner, _Spent] = {}
        self._expected: dict[Spender, Spending] = {}

    def _read(self, trail: Iterable[Mapping[Any, Any]]) -> Iterable[Problem]:
        latest: dict[str, _Standing] = {}
        for row in trail:
            if row["action"] not in ("budget.set", "budget.remove"):
                continue
            said = orjson.loads(row["after"])
            if before := latest.pop(row["subject"], None):
                before.ends = int(said["entry"])
            if row["action"] == "budget.set":
                standing = _Standing(_limit(said, row), row["at_ns"], int(said["entry"]))
                latest[row["subject"]] = self._decisions[row["seq"]] = standing
                self._of.setdefault(standing.limit.tenant, []).append(standing)
        return ()

    def take_charge(self, booked: Booked) -> None:
        """Adds a charge. Raises `Differs` if its hold was not checked as the trail asks."""
        entry, details = booked.entry, booked.details
        standings = self._begin(entry.tenant)
        checked = details.get("limits", {})
        for name, version in checked.items():
            self._check_named(entry, details, name, version)
        owners: set[_Owner] = set()
        for each in standings:
            spender = each.limit.spender(details, entry.moment_ns)
            if spender is None:
                continue
            owners.add((each.limit.of, spender))
            if each.limit.name not in checked and _is_due(each, entry, details):
                raise Differs("limited", f"its hold was not checked against {each.limit.name!r}")
            if checked.get(each.limit.name) == each.limit.version:
                at, held = details.get("checked_at", 0), int(details["held"])
                check = _Checked(at, each.limit.version, entry.seq, held, entry.request_id)
                self._at((each.limit.of, spender)).checks.append(check)
        for owner in owners:
            self._at(owner).charges.append((entry.seq, -entry.amount))
        if owners and (entry.tenant, entry.seq) in self._corrected:
            self._owners[entry.seq] = owners

    def take_correction(self, booked: Booked) -> None:
        self._begin(booked.entry.tenant)
        for owner in self._owners.get(booked.details["corrects"], ()):
            self._at(owner).charges.append((booked.entry.seq, -booked.entry.amount))

    def problems(self) -> list[Problem]:
        """The limits that were passed. Call it after the last entry."""
        self._end()
        return self._problems

    def spending(self) -> dict[Spender, Spending]:
        """What the limits in force count. Call it after the last entry."""
        self._end()
        for hold in self._holds:
            body = orjson.loads(hold.body)
            for limit in self._in_force(hold.tenant):
                spender = limit.spender(body, body.get("admitted_ns", 0))
                if spender is not None:
                    before = self._expected.get(spender, NOTHING)
                    self._expected[spender] = before.plus(0, hold.amount)
        return {spender: found for spender, found in self._expected.items() if any(found)}

    def limited(self, tenant: str) -> bool:
        return bool(self._in_force(tenant))

    def _in_force(self, tenant: str) -> list[SpendLimit]:
        return [each.limit for each in self._of.get(tenant, ()) if each.ends is None]

    def _at(self, owner: _Owner) -> _Spent:
        return self._spent.setdefault(owner, _Spent())

    def _begin(self, tenant: str) -> list[_Standing]:
        if tenant != self._tenant:
            self._end()
            self._tenant = tenant
        return self._of.get(tenant, [])

    def _end(self) -> None:
        """Checks the spending of a tenant whose entries were all read."""
        for hold in self._holds:
            if hold.tenant == self._tenant and hold.checked is not None:
                self._add_open(hold)
        in_force = {limit.name: limit for limit in self._in_force(self._tenant)}
        for (of, spender), spent in self._spent.items():
            self._problems += self._passed(spender, spent)
            limit = in_force.get(spender.limit)
            if limit is not None and limit.of == of and limit.counts(spender):
                charged = sum(amount for _, amount in spent.charges)
                self._expected[spender] = Spending(charged)
        self._tenant, self._spent, self._owners = "", {}, {}

    def _add_open(self, hold: StoredHold) -> None:
        assert hold.checked is not None
        body = orjson.loads(hold.body)
        for version in hold.checked.limits.values():
            standing = self._decisions.get(version)
            limit = standing.limit if standing else None
            spender = limit.spender(body, body.get("admitted_ns", 0)) if limit else None
            if limit is not None and spender is not None:
                check = _Checked(hold.checked.at, version, OPEN, hold.amount, hold.request_id)
                self._at((limit.of, spender)).checks.append(check)

    def _check_named(
        self, entry: Entry, details: Mapping[str, Any], name: str, version: int
    ) -> None:
        """Checks that a charge names a limit that stood when it says."""
        standing = self._decisions.get(version)
        at = details.get("checked_at", 0)
        stood = (
            standing is not None
            and (standing.limit.name, standing.limit.tenant) == (name, entry.tenant)
            and standing.begins <= at < entry.seq
            and (standing.ends is None or at <= standing.ends)
        )
        if not stood:
            raise Differs("limited", f"limit {name!r} did not stand so after entry {at}")

    def _passed(self, spender: Spender, spent: _Spent) -> Iterator[Problem]:
        """The first check at which a limit was passed, if there is one."""
        moves = [((seq, 0), amount) for seq, amount in spent.charges]
        for check in spent.checks:
            moves.append(((check.at, check.version), check.held))
            moves.append(((check.ends, 0), -check.held))
        # A hold of nothing passes nothing: it is given whatever was spent.
        checked = {(check.at, check.version): check for check in spent.checks if check.held}
        total = 0
        moves.sort()
        for number, (place, amount) in enumerate(moves):
            total += amount
            is_last = number + 1 == len(moves) or moves[number + 1][0] != place
            if is_last and place in checked:
                limit = self._decisions[place[1]].limit
                if total > limit.amount:
                    yield _problem(limit, spender, checked[place], total)
                    return


def _limit(said: Mapping[str, Any], row: Mapping[Any, Any]) -> SpendLimit:
    return SpendLimit(
        name=row["subject"],
        amount=parse_units(said["amount"]),
        since_ns=int(said["since_ns"]),
        version=row["seq"],
        **{name: said[name] for name in ("tenant", "per", "of", "value")},
    )


def _is_due(standing: _Standing, entry: Entry, details: Mapping[str, Any]) -> bool:
    """Whether a charge's hold must have been checked under this decision.

    A pin's past hour has no hold. A request that ended before it was admitted tells of a clock that
    was set back.
    """
    ends = OPEN if standing.ends is None else standing.ends
    stood = standing.begins < entry.seq <= ends
    admitted_ns = details.get("admitted_ns", 0)
    is_stored = set(details.get("usage", {})) in STORED
    is_known = standing.set_ns + LAG_NS < admitted_ns <= entry.at_ns
    return stood and is_known and not is_stored


def _problem(limit: SpendLimit, spender: Spender, check: _Checked, total: int) -> Problem:
    whose = f"{limit.of} {spender.value!r}" if spender.value else "the tenant"
    message = (
        f"with its hold, {whose} had spent and held {format_units(total)} in {spender.period}; "
        f"limit {limit.name!r} is {format_units(limit.amount)}"
    )
    seq = check.ends if check.ends != OPEN else 0
    return Problem(limit.tenant, seq, "limited", message, check.request_id)
