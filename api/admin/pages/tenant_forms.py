"""The forms of a tenant's page: money in and out, limits and budgets, by their names."""

from collections.abc import Mapping
from typing import Final

from api.admin.pages.operation_forms import OperationForm
from billing.operations import balance, budgets, tenants
from billing.tenants import OF_TENANT, OF_USER

CREDIT_HINT: Final = "0 is prepaid; “unlimited” sets none"
LIMITS: Final = {
    "requests": "Requests a minute",
    "miss_tokens": "Computed tokens a minute",
    "output_tokens": "Output tokens a minute",
    "concurrency": "Requests at once",
}
LIMITS_OF_USER: Final = {
    name: f"{LIMITS[of]}, each end user" for name, of in zip(OF_USER, OF_TENANT, strict=True)
}

FORMS: Final[Mapping[str, OperationForm]] = {
    "deposit": OperationForm(
        operation=balance.book_deposit,
        done="The money is booked.",
        button="Book it",
        labels={
            "kind": "What",
            "amount": "Amount",
            "reference": "Reference",
            "expires": "Last day",
        },
        choices={
            "kind": {
                "topup": "Top-up: was paid",
                "grant": "Grant: a gift, spent first",
                "withdraw": "Withdrawal: was paid out",
                "chargeback": "Chargeback: the bank took it back",
            }
        },
    ),
    "adjust": OperationForm(
        operation=balance.adjust_deposit,
        done="The difference is booked.",
        button="Book the difference",
        labels={"deposit": "Mistyped top-up or grant", "amount": "Amount"},
    ),
    "currency": OperationForm(
        operation=tenants.set_currency,
        done="The currency is changed.",
        button="Change the currency",
        labels={"currency": "Currency"},
    ),
    "limit": OperationForm(
        operation=tenants.set_credit_limit,
        done="The credit limit is changed.",
        button="Change the limit",
        labels={"credit_limit": "How far below zero it may go"},
        hints={"credit_limit": CREDIT_HINT},
    ),
    "rates": OperationForm(
        operation=tenants.set_rate_limits,
        done="The limits are changed.",
        button="Change the limits",
        labels={"limits": "Limits"},
        choices={"limits": LIMITS | LIMITS_OF_USER},
    ),
    "suspend": OperationForm(
        operation=tenants.suspend_tenant,
        done="The tenant is suspended: new requests are refused.",
        button="Refuse new requests",
    ),
    "resume": OperationForm(
        operation=tenants.resume_tenant,
        done="The tenant is served again.",
        button="Serve it again",
    ),
    "budget": OperationForm(
        operation=budgets.set_budget,
        done="The budget is set.",
        button="Set the budget",
        labels={
            "name": "Name",
            "amount": "Amount",
            "per": "Per",
            "of": "Of",
            "value": "Whose",
        },
        choices={
            "per": {
                "month": "month",
                "day": "day",
            }
        },
    ),
    "unbudget": OperationForm(
        operation=budgets.remove_budget,
        done="The budget is removed.",
        button="Remove the budget",
        labels={"name": "Name"},
    ),
}
