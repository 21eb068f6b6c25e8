"""Proves admins' decisions: the trail is one chain, and the tables match it.

    trailed     the admin trail is chained without a gap
    decided     credit, rate and hard limits, suspensions, projects, keys and rate cards are those
                of the trail, no more and no fewer

Key secrets are not in the trail. The creation time of a project is the trail's own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from billing.money import format_units
from billing.proof.result import Head, Problem
from billing.store import accounts as store_accounts
from billing.store import limits as store_limits
from billing.store import trail as store_trail
from billing.store.store import Connection

TRAIL = "admin trail"  # its name among heads; tenants' names have no space

Row = Mapping[Any, Any]
_Name = tuple[str, str]  # kind and name
_Facts = dict[_Name, dict[str, str | None]]
_CARD_FACTS = ("name", "version", "valid_from_ns", "applied_ns", "digest")
_MADE_BY = {
    "tenant.create": "tenant",
    "tenant.currency": "tenant",
    "tenant.limit": "tenant",
    "tenant.suspend": "tenant",
    "project.create": "project",
    "key.create": "key",
    "key.revoke": "key",
    "prices.apply": "rate card",
}


def check_trail(connection: Connection, written_down: Mapping[int, set[str]]) -> Iterator[Problem]:
    """The first row that differs, else the first fact that does not match the trail."""
    rows = store_trail.trail_rows(connection)
    broken = [*_check_chain(rows, written_down)]
    yield from broken or _differences(_standing(connection), _decided(rows))


def trail_head(connection: Connection) -> Head:
    seq, digest = store_trail.last_hash(connection)
    return seq, digest.hex()


def _check_chain(rows: Sequence[Row], written_down: Mapping[int, set[str]]) -> Iterator[Problem]:
    head, last = store_trail.TRAIL_GENESIS, 0
    for row in rows:
        head = store_trail.trail_hash(head, row)
        if row["seq"] != last + 1 or row["hash"] != head:
            yield Problem(f"trail entry {row['seq']}", 0, "trailed", "it does not match its hash")
            return
        last = row["seq"]
        if others := written_down.get(last, set()) - {head.hex()}:
            said = " and ".join(sorted(others))
            message = f"its hash was {said} in a recorded head"
            yield Problem(f"trail entry {last}", 0, "trailed", message)
            return
    if written_down and last < max(written_down):
        message = f"a recorded head names entry {max(written_down)}, but {last} is last"
        yield Problem(TRAIL, 0, "trailed", message)


def _decided(rows: Iterable[Row]) -> _Facts:
    """The facts that result from the trail."""
    facts: _Facts = {}
    for row in rows:
        kind = _MADE_BY.get(row["action"])
        if row["action"] in ("budget.set", "budget.remove"):
            facts.pop(("budget", row["subject"]), None)
            if row["action"] == "budget.set":
                said = orjson.loads(row["after"])
                facts["budget", row["subject"]] = _limit_facts(said, row["seq"])
        elif row["action"] == "tenant.rates":  # has all remaining limits
            facts.pop(("limits of tenant", row["subject"]), None)
            if limits := _texts(orjson.loads(row["after"])):
                facts["limits of tenant", row["subject"]] = limits
        elif kind is not None:
            changed = orjson.loads(row["after"])
            facts.setdefault((kind, row["subject"]), {}).update(_texts(changed))
    return facts


def _standing(connection: Connection) -> _Facts:
    """The same facts from the tables."""
    facts: _Facts = {}
    for row in store_accounts.tenant_rows(connection):
        facts["tenant", row["tenant"]] = _texts(
            {name: row[name] for name in ("currency", "credit_limit", "suspended", "created_ns")}
        )
        for project in store_accounts.project_names(connection, row["tenant"]):
            facts["project", f"{row['tenant']}/{project}"] = {}
    for tenant, limits in store_accounts.rate_limits_of(connection).items():
        facts["limits of tenant", tenant] = _texts(limits)
    for limit in store_limits.limit_rows(connection):
        said = {**asdict(limit), "amount": format_units(limit.amount)}
        facts["budget", limit.name] = _limit_facts(said, limit.version)
    for row in store_accounts.key_rows(connection):
        facts["key", row["key_id"]] = _texts({k: v for k, v in row.items() if k != "digest"})
    for row in store_accounts.card_rows(connection):
        facts["rate card", f"{row['name']} {row['version']}"] = _texts(
            {name: row[name] for name in _CARD_FACTS}
        )
    return facts


def _limit_facts(said: Mapping[str, Any], version: int) -> dict[str, str | None]:
    names = ("tenant", "amount", "per", "of", "value", "since_ns")
    return _texts({name: said[name] for name in names} | {"version": version})


def _texts(values: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: None if value is None else str(value) for name, value in values.items()}


def _differences(standing: _Facts, decided: _Facts) -> Iterator[Problem]:
    for kind, name in sorted(standing.keys() | decided.keys()):
        found, said = standing.get((kind, name)), decided.get((kind, name))
        if found is None or said is None:
            message = "nobody created it" if said is None else "it was created, but is missing"
            yield Problem(f"{kind} {name!r}", 0, "decided", message)
            continue
        if kind == "tenant":
            said.setdefault("suspended", "False")
        for fact in sorted(found.keys() | said.keys()):
            if found.get(fact) != said.get(fact):
                message = f"its {fact} is {found.get(fact)}, but the trail says {said.get(fact)}"
                yield Problem(f"{kind} {name!r}", 0, "decided", message)
                break
