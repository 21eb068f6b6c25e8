"""The forms of a tenant's page: money in and out, limits, budgets and invoices.

Forms over `billing.operations`, which come back to the page. Plain functions: the server runs them
on its thread pool, because they write the ledger's database.
"""

import secrets

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.access import MayChange
from api.admin.pages.forms import Text, count_in, limit_in, names_in, reason_in
from api.admin.pages.tenants import after
from api.errors import InvalidRequest
from billing.alerts.budgets import BudgetSpan, Of
from billing.invoices.register import InvoiceState
from billing.operations import balance, budgets, invoices, tenants
from billing.operations.balance import Booking
from billing.operations.books import Books
from billing.tenants import RATE_LIMITS

router = APIRouter(prefix="/admin", include_in_schema=False)


@router.post("/tenants/{tenant}/deposit")
def deposit(
    request: Request,
    tenant: str,
    admin: MayChange,
    kind: Text = "topup",
    amount: Text = "",
    reference: Text = "",
    expires: Text = "",
    scope: Text = "",
    once: Text = "",
    why: Text = "",
) -> Response:
    """Book money in or out.

    `once` is the page's own reference, new each time it is shown: a double click books once.
    """

    def book(books: Books) -> None:
        if kind not in list(Booking):
            raise InvalidRequest(f"kind is none of {', '.join(Booking)}")
        balance.book_deposit(
            books,
            tenant=tenant,
            kind=Booking(kind),
            amount=amount,
            reference=reference.strip() or f"{kind}_{once or secrets.token_hex(8)}",
            expires=expires.strip() or None,
            scope=names_in(scope),
            by=admin.name,
            why=reason_in(why),
        )

    return after(request, admin, tenant, book, kind)


@router.post("/tenants/{tenant}/wallet")
def wallet(
    request: Request,
    tenant: str,
    admin: MayChange,
    kind: Text = "topup",
    currency: Text = "",
    amount: Text = "",
    rate: Text = "",
    rate_date: Text = "",
    rate_source: Text = "",
    once: Text = "",
    why: Text = "",
) -> Response:
    """Book money into or out of a wallet, or convert some of one into the balance."""

    def book(books: Books) -> None:
        if kind not in ("topup", "withdraw", "convert"):
            raise InvalidRequest("kind is none of topup, withdraw, convert")
        if not currency.strip():
            raise InvalidRequest("say the currency of the wallet, such as USD")
        if kind == "convert" and not rate.strip():
            raise InvalidRequest("say the rate: what one unit of the wallet's currency is worth")
        at = {"rate": rate, "rate_date": rate_date, "rate_source": rate_source}
        balance.book_deposit(
            books,
            tenant=tenant,
            kind=Booking.WITHDRAW if kind == "withdraw" else Booking.TOPUP,
            amount=amount,
            reference=f"{kind}_{once or secrets.token_hex(8)}",
            currency=currency.strip().upper(),
            **({name: value.strip() for name, value in at.items()} if kind == "convert" else {}),
            by=admin.name,
            why=reason_in(why),
        )

    return after(request, admin, tenant, book, "wallet")


@router.post("/tenants/{tenant}/adjust")
def adjust(
    request: Request,
    tenant: str,
    admin: MayChange,
    deposit: Text = "",
    amount: Text = "",
    once: Text = "",
    why: Text = "",
) -> Response:
    """Correct a mistyped top-up or grant."""

    def book(books: Books) -> None:
        balance.adjust_deposit(
            books,
            tenant=tenant,
            deposit=deposit.strip(),
            amount=amount,
            reference=f"adjust_{once or secrets.token_hex(8)}",
            by=admin.name,
            why=reason_in(why),
        )

    return after(request, admin, tenant, book, "adjust")


@router.post("/tenants/{tenant}/limit")
def limit(
    request: Request, tenant: str, admin: MayChange, credit_limit: Text = "", why: Text = ""
) -> Response:
    def change(books: Books) -> None:
        tenants.set_credit_limit(
            books,
            tenant=tenant,
            credit_limit=limit_in(credit_limit),
            by=admin.name,
            why=reason_in(why),
        )

    return after(request, admin, tenant, change, "limit")


@router.post("/tenants/{tenant}/rates")
def rates(
    request: Request,
    tenant: str,
    admin: MayChange,
    requests: Text = "",
    miss_tokens: Text = "",
    output_tokens: Text = "",
    concurrency: Text = "",
    why: Text = "",
) -> Response:
    """Limit requests and tokens a minute; an empty field is as the settings say."""
    typed = (requests, miss_tokens, output_tokens, concurrency)

    def change(books: Books) -> None:
        tenants.set_rate_limits(
            books,
            tenant=tenant,
            limits={name: count_in(text) for name, text in zip(RATE_LIMITS, typed, strict=True)},
            by=admin.name,
            why=reason_in(why),
        )

    return after(request, admin, tenant, change, "rates")


@router.post("/tenants/{tenant}/state")
def set_state(
    request: Request, tenant: str, admin: MayChange, suspended: Text = "", why: Text = ""
) -> Response:
    """Suspend a tenant, or serve it again."""
    stop = suspended == "yes"

    def change(books: Books) -> None:
        operation = tenants.suspend_tenant if stop else tenants.resume_tenant
        operation(books, tenant=tenant, by=admin.name, why=reason_in(why))

    return after(request, admin, tenant, change, "suspend" if stop else "resume")


@router.post("/tenants/{tenant}/budget")
def budget(
    request: Request,
    tenant: str,
    admin: MayChange,
    name: Text = "",
    amount: Text = "",
    per: Text = "month",
    of: Text = "tenant",
    value: Text = "",
    ask: Text = "",
    why: Text = "",
) -> Response:
    """Set a budget of this tenant, or with an empty amount remove it."""

    def change(books: Books) -> None:
        reason, named = reason_in(why), name.strip()
        standing = {each["name"]: each["tenant"] for each in budgets.list_budgets(books)}
        if standing.get(named, tenant) != tenant:
            raise InvalidRequest(f"budget {named!r} is another tenant's; choose another name")
        if not amount.strip():
            budgets.remove_budget(books, name=named, by=admin.name, why=reason)
            return
        if per not in list(BudgetSpan) or of not in list(Of):
            raise InvalidRequest(
                "a budget is per day, month, balance, topup or spike, of a tenant, key, user or tag"
            )
        budgets.set_budget(
            books,
            name=named,
            tenant=tenant,
            amount=amount,
            per=BudgetSpan(per),
            of=Of(of),
            value=value.strip(),
            ask=ask.strip(),
            by=admin.name,
            why=reason,
        )

    return after(request, admin, tenant, change, "budget" if amount.strip() else "unbudget")


@router.post("/tenants/{tenant}/invoice")
def invoice(
    request: Request,
    tenant: str,
    admin: MayChange,
    do: Text = "",
    month: Text = "",
    number: Text = "",
    why: Text = "",
) -> Response:
    """Issue the invoice of a month, or mark or credit one that was issued."""

    def change(books: Books) -> object:
        by, reason = admin.name, reason_in(why)
        if do == "finalize":
            return invoices.finalize_invoice(books, tenant=tenant, month=month, by=by, why=reason)
        if number not in {each["number"] for each in invoices.list_invoices(books, tenant=tenant)}:
            raise InvalidRequest(f"tenant {tenant!r} has no invoice of this number")
        if do == "credit":
            return invoices.credit_invoice(books, number=number, by=by, why=reason)
        if do not in ("paid", "void"):
            raise InvalidRequest("an invoice is issued, marked paid or void, or credited")
        return invoices.mark_invoice(
            books, number=number, state=InvoiceState(do), by=by, why=reason
        )

    return after(request, admin, tenant, change, do)
