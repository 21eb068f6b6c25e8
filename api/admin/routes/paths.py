"""The JSON route of each operation, for clients that call operations over HTTP.

`{name}` is replaced by that argument of the operation. The other arguments are a GET's query
parameters or the fields of a POST's body. A test compares this table with the routes. Operations
are named, not imported, so a command imports only the one that it calls.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Path(NamedTuple):
    """A method and a path below /admin/api."""

    method: str
    template: str


PREFIX = "/admin/api"
PATHS: Mapping[str, Path] = {
    "tenants.list_tenants": Path("GET", "/tenants"),
    "tenants.show_tenant": Path("GET", "/tenants/{tenant}"),
    "tenants.create_tenant": Path("POST", "/tenants"),
    "tenants.set_credit_limit": Path("POST", "/tenants/{tenant}/limit"),
    "tenants.set_rate_limits": Path("POST", "/tenants/{tenant}/rates"),
    "tenants.suspend_tenant": Path("POST", "/tenants/{tenant}/suspend"),
    "tenants.resume_tenant": Path("POST", "/tenants/{tenant}/resume"),
    "tenants.create_project": Path("POST", "/tenants/{tenant}/projects"),
    "keys.list_keys": Path("GET", "/keys"),
    "keys.create_key": Path("POST", "/keys"),
    "keys.revoke_key": Path("POST", "/keys/{key_id}/revoke"),
    "balance.show_balance": Path("GET", "/balance/{tenant}"),
    "balance.book_deposit": Path("POST", "/balance/{tenant}/{kind}"),
    "balance.adjust_deposit": Path("POST", "/balance/{tenant}/adjust"),
    "budgets.list_budgets": Path("GET", "/budgets"),
    "budgets.set_budget": Path("POST", "/budgets/{name}"),
    "budgets.remove_budget": Path("POST", "/budgets/{name}/remove"),
    "prices.applied_cards": Path("GET", "/prices"),
    "prices.plan_card": Path("POST", "/prices/plan"),
    "prices.apply_card": Path("POST", "/prices/apply"),
    "usage.period_usage": Path("GET", "/usage"),
    "usage.session_usage": Path("GET", "/usage/session"),
    "usage.make_statement": Path("GET", "/usage/statement/{tenant}/{month}"),
    "usage.sign_receipt": Path("GET", "/receipts/{tenant}/{request_id}"),
    "invoices.list_invoices": Path("GET", "/invoices"),
    "invoices.show_invoice": Path("GET", "/invoices/{number}"),
    "invoices.show_month": Path("GET", "/invoices/of/{tenant}/{month}"),
    "invoices.finalize_invoice": Path("POST", "/invoices"),
    "invoices.mark_invoice": Path("POST", "/invoices/{number}/mark"),
    "invoices.credit_invoice": Path("POST", "/invoices/{number}/credit"),
    "invoices.show_parties": Path("GET", "/parties"),
    "invoices.apply_parties": Path("POST", "/parties"),
    "ledger.list_holds": Path("GET", "/holds"),
    "ledger.list_entries": Path("GET", "/ledger/entries/{tenant}"),
    "ledger.admin_trail": Path("GET", "/audit"),
    "ledger.rerate_history": Path("GET", "/ledger/rerate"),
    "ledger.make_refunds": Path("GET", "/ledger/refunds"),
    "ledger.correct_charge": Path("POST", "/ledger/correct"),
    "ledger.correct_charges": Path("POST", "/ledger/corrections"),
}


def path_of(operation: Callable[..., Any]) -> Path:
    """The route of this function of `billing.operations`."""
    return PATHS[f"{operation.__module__.rpartition('.')[2]}.{operation.__name__}"]
