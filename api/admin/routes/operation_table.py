"""The operations on accounts, the ledger and the cache, one row each.

A row names a function of `billing.operations`, or of `api.admin.cache`, and its JSON route below
/admin/api. The rest is in the function's signature. An argument that the path names is there; the
others are a GET's query parameters or the fields of a POST's body. Words and bounds are
`billing.operations.arguments`. `by` is the caller. A `why` means that the function changes
something, which only an admin may. `api.admin.routes.derived` makes the routes from the rows. The
forms of the pages send to them, and the commands on money call the same functions.

Functions are named, not imported, so a command imports only the one that it calls.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple

PREFIX = "/admin/api"


class Operation(NamedTuple):
    """A function, as `module.name`, and its route."""

    name: str
    method: Literal["GET", "POST"]
    path: str
    status: int = 200

    @property
    def module(self) -> str:
        return self.name.partition(".")[0]

    def function(self) -> Callable[..., Any]:
        """Imports it."""
        module, _, name = self.name.partition(".")
        package = "api.admin" if module == "cache" else "billing.operations"
        found: Callable[..., Any] = getattr(import_module(f"{package}.{module}"), name)
        return found


def _get(name: str, path: str) -> Operation:
    return Operation(name, "GET", path)


def _post(name: str, path: str, status: int = 200) -> Operation:
    return Operation(name, "POST", path, status)


# A path without names stands before one with names that would take it.
TABLE = (
    _get("tenants.list_tenants", "/tenants"),
    _get("tenants.show_tenant", "/tenants/{tenant}"),
    _post("tenants.create_tenant", "/tenants", 201),
    _post("tenants.set_currency", "/tenants/{tenant}/currency"),
    _post("tenants.set_credit_limit", "/tenants/{tenant}/limit"),
    _post("tenants.set_rate_limits", "/tenants/{tenant}/rates"),
    _post("tenants.suspend_tenant", "/tenants/{tenant}/suspend"),
    _post("tenants.resume_tenant", "/tenants/{tenant}/resume"),
    _post("tenants.create_project", "/tenants/{tenant}/projects", 201),
    _get("keys.list_keys", "/keys"),
    _post("keys.create_key", "/keys", 201),
    _post("keys.revoke_key", "/keys/{key_id}/revoke"),
    _get("balance.show_balance", "/balance/{tenant}"),
    _post("balance.adjust_deposit", "/balance/{tenant}/adjust"),
    _post("balance.book_deposit", "/balance/{tenant}/{kind}"),
    _get("budgets.list_budgets", "/budgets"),
    _post("budgets.set_budget", "/budgets"),
    _post("budgets.remove_budget", "/budgets/{name}/remove"),
    _get("prices.applied_cards", "/prices"),
    _post("prices.show_card", "/prices/show"),
    _post("prices.lint_card", "/prices/lint"),
    _post("prices.plan_card", "/prices/plan"),
    _post("prices.apply_card", "/prices/apply"),
    _get("usage.period_usage", "/usage"),
    _get("usage.session_usage", "/usage/session"),
    _get("usage.make_statement", "/usage/statement/{tenant}/{month}"),
    _get("usage.sign_receipt", "/receipts/{tenant}/{request_id}"),
    _get("ledger.list_holds", "/holds"),
    _get("ledger.list_entries", "/ledger/entries/{tenant}"),
    _get("ledger.admin_trail", "/audit"),
    _get("ledger.rerate_history", "/ledger/rerate"),
    _post("ledger.correct_charge", "/ledger/correct"),
    _get("cache.pins", "/cache/pins"),
    _post("cache.pin", "/cache/pin"),
    _post("cache.unpin", "/cache/unpin"),
    _post("cache.evict", "/cache/evict"),
    _post("cache.purge", "/cache/purge"),
)
# Routes that are gone, with what to use instead.
_BILLING = "the billing system that `cachesvc usage export` feeds issues invoices"
_ONE_BY_ONE = "give requests back one by one by POST /admin/api/ledger/correct"
REMOVED: Mapping[str, str] = {
    "blocks": "GET /admin/api/cache/tree, which has every tier's",
    "cache/diff": "GET /admin/api/requests/ID has where a sent prompt diverges",
    "cache/working-set": "the cache's page has how long blocks lie idle, and until their next use",
    "detokenize": "POST /detokenize",
    "events": "routers read block events at `events.zmq`, in vLLM's format; see docs/events.md",
    "invoices": _BILLING,
    "parties": _BILLING,
    "ledger/refunds": _ONE_BY_ONE,
    "ledger/corrections": _ONE_BY_ONE,
    "ledger": "GET /metrics has its counters, GET /admin/api/ledger/heads its last entries",
}
# Values of arguments that are gone, by the argument's name.
_ALERT = "Prometheus alerts, see {} in ops/prometheus/rules.yml"
REMOVED_VALUES: Mapping[str, Mapping[str, str]] = {
    "per": {
        "balance": _ALERT.format("BalanceLow"),
        "topup": _ALERT.format("TopUpWanted"),
        "spike": _ALERT.format("SpendingSpiked"),
    },
    "format": {"html": "open JSON or CSV in a spreadsheet"},
}
_BY_NAME: Mapping[str, Operation] = {row.name: row for row in TABLE}


def operation_of(function: Callable[..., Any]) -> Operation:
    """The row of this function."""
    return _BY_NAME[f"{function.__module__.rpartition('.')[2]}.{function.__name__}"]
