"""The operations on accounts, the ledger and the cache, one row each.

A row names a function of `billing.operations`, or of `api.admin.cache`, and its JSON route below
/admin/api. The rest is in the function's signature. An argument that the path names is there; the
others are a GET's query parameters or the fields of a POST's body. Words and bounds are
`billing.operations.arguments`. `by` is the caller. A `why` means that the function changes
something, which only an admin may. `api.admin.routes.derived` makes the routes from the rows,
`api.admin.pages.operation_forms` the dashboard's forms, and the commands call the routes.

Functions are named, not imported, so a command imports only the one that it calls.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple

PREFIX = "/admin/api"


class Ask(NamedTuple):
    """An argument that a form asks for.

    `hint` replaces words that suit JSON only. `choices` replaces the values of a choice and gives
    them words.
    """

    label: str
    hint: str | None = None
    choices: Mapping[str, str] | None = None


class Form(NamedTuple):
    """How a page asks for an operation: the arguments in its order."""

    name: str
    button: str
    done: str  # the page says it afterwards
    asks: Mapping[str, Ask]


class Operation(NamedTuple):
    """A function, as `module.name`, its route, and its form if a page has one."""

    name: str
    method: Literal["GET", "POST"]
    path: str
    status: int = 200
    form: Form | None = None

    def asked(self, name: str, button: str, done: str, /, **asks: str | Ask) -> "Operation":
        """The same with a form."""
        full = {each: Ask(ask) if isinstance(ask, str) else ask for each, ask in asks.items()}
        return self._replace(form=Form(name, button, done, full))

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


_CREDIT = "0 is prepaid; “unlimited” sets none"
_LIMITS = {
    "requests": "Requests a minute",
    "miss_tokens": "Computed tokens a minute",
    "output_tokens": "Output tokens a minute",
    "concurrency": "Requests at once",
}
LIMITS = _LIMITS | {f"user_{name}": f"{words}, each end user" for name, words in _LIMITS.items()}
_BOOKINGS = {
    "topup": "Top-up: was paid",
    "grant": "Grant: a gift, spent first",
    "withdraw": "Withdrawal: was paid out",
    "chargeback": "Chargeback: the bank took it back",
}
_SCOPES = {
    "inference": "ask the model",
    "usage": "read its own usage",
    "read": "look at everything, of every tenant",
    "admin": "change everything, of every tenant",
}

# A path without names stands before one with names that would take it.
TABLE = (
    _get("tenants.list_tenants", "/tenants"),
    _get("tenants.show_tenant", "/tenants/{tenant}"),
    _post("tenants.create_tenant", "/tenants", 201).asked(
        "tenant",
        "Create the tenant",
        "The tenant was created.",
        tenant="Name",
        currency="Currency",
        credit_limit=Ask("Credit limit", _CREDIT),
    ),
    _post("tenants.set_currency", "/tenants/{tenant}/currency").asked(
        "currency", "Change the currency", "The currency is changed.", currency="Currency"
    ),
    _post("tenants.set_credit_limit", "/tenants/{tenant}/limit").asked(
        "limit",
        "Change the limit",
        "The credit limit is changed.",
        credit_limit=Ask("How far below zero it may go", _CREDIT),
    ),
    _post("tenants.set_rate_limits", "/tenants/{tenant}/rates").asked(
        "rates",
        "Change the limits",
        "The limits are changed.",
        limits=Ask("Limits", choices=LIMITS),
    ),
    _post("tenants.suspend_tenant", "/tenants/{tenant}/suspend").asked(
        "suspend", "Refuse new requests", "The tenant is suspended: new requests are refused."
    ),
    _post("tenants.resume_tenant", "/tenants/{tenant}/resume").asked(
        "resume", "Serve it again", "The tenant is served again."
    ),
    _post("tenants.create_project", "/tenants/{tenant}/projects", 201),
    _get("keys.list_keys", "/keys"),
    _post("keys.create_key", "/keys", 201).asked(
        "key",
        "Create the key",
        "The key is created.",
        tenant="Tenant",
        name=Ask("Name", "to know it by"),
        scopes=Ask("It may", choices=_SCOPES),
        expires_in_s=Ask("Days", "until it expires; empty is never"),
    ),
    _post("keys.revoke_key", "/keys/{key_id}/revoke").asked(
        "revoke", "Revoke", "The key is revoked, from now on."
    ),
    _get("balance.show_balance", "/balance/{tenant}"),
    _post("balance.adjust_deposit", "/balance/{tenant}/adjust").asked(
        "adjust",
        "Book the difference",
        "The difference is booked.",
        deposit="Mistyped top-up or grant",
        amount="Amount",
    ),
    _post("balance.book_deposit", "/balance/{tenant}/{kind}").asked(
        "deposit",
        "Book it",
        "The money is booked.",
        kind=Ask("What", choices=_BOOKINGS),
        amount="Amount",
        reference="Reference",
        expires="Last day",
    ),
    _get("budgets.list_budgets", "/budgets"),
    _post("budgets.set_budget", "/budgets/{name}").asked(
        "budget",
        "Set the budget",
        "The budget is set.",
        name="Name",
        amount="Amount",
        per=Ask("Per", choices={"month": "month", "day": "day"}),
        of="Of",
        value="Whose",
    ),
    _post("budgets.remove_budget", "/budgets/{name}/remove").asked(
        "unbudget", "Remove the budget", "The budget is removed.", name="Name"
    ),
    _get("prices.applied_cards", "/prices"),
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
    _post("cache.pin", "/cache/pin").asked(
        "pin",
        "Keep these blocks",
        "Pinned. It stays in at least one tier until the pin ends.",
        name="Name of the pin",
        for_s=Ask("Hours", ""),
    ),
    _post("cache.unpin", "/cache/unpin").asked(
        "unpin", "Unpin", "Unpinned. It may be evicted again."
    ),
    _post("cache.evict", "/cache/evict").asked(
        "evict",
        "Remove from every tier",
        "Evicted. The audit log says how many blocks left each tier.",
    ),
    _post("cache.purge", "/cache/purge").asked(
        "purge",
        "Purge everything of this tenant",
        "Purged from every tier, and a look at all of them found nothing left.",
    ),
)
# Routes that are gone, with what to use instead.
_BILLING = "the billing system that `cachesvc usage export` feeds issues invoices"
_ONE_BY_ONE = "give requests back one by one by POST /admin/api/ledger/correct"
REMOVED: Mapping[str, str] = {
    "blocks": "GET /admin/api/cache/tree, which has every tier's",
    "cache/working-set": "the cache's page has how long blocks lie idle, and until their next use",
    "detokenize": "POST /detokenize",
    "events": "routers read block events at `events.zmq`, in vLLM's format; see docs/events.md",
    "invoices": _BILLING,
    "parties": _BILLING,
    "ledger/refunds": _ONE_BY_ONE,
    "ledger/corrections": _ONE_BY_ONE,
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
    """The row of this function of `billing.operations`."""
    return _BY_NAME[f"{function.__module__.rpartition('.')[2]}.{function.__name__}"]
