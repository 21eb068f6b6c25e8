"""The forms of a tenant's page: money in and out, limits, budgets and invoices.

Forms over `billing.operations`, which return to the page. Plain functions: the server runs them on
its thread pool, because they write to the ledger's database.
"""

import secrets
from collections.abc import Callable
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Request
from starlette.responses import RedirectResponse, Response

from api.admin.access import MayChange
from api.admin.pages.forms import Text, count_in, limit_in, names_in, reason_in, tried
from api.admin.pages.tenants import show_tenant
from api.errors import InvalidRequest
from billing.alerts.budgets import BudgetSpan, Of
from billing.operations import balance, budgets, invoices, tenants
from billing.operations.balance import Booking
from billing.operations.books import Books
from billing.operations.invoices import Mark
from billing.tenants import RATE_LIMITS

router = APIRouter(prefix="/admin/tenants/{tenant}", include_in_schema=False)


class _TenantForm:
    """A submitted form of a tenant's page: its sender and its reason."""

    def __init__(self, request: Request, tenant: str, admin: MayChange, why: Text = "") -> None:
        self.tenant = tenant
        self._request, self._admin, self._why = request, admin, why

    def change(self, done: str, operation: Callable[..., object], **values: Any) -> Response:
        """Runs the operation and returns to the page, with the error if there was one."""

        def change(books: Books) -> None:
            why = reason_in(self._why)
            operation(books, tenant=self.tenant, **values, by=self._admin.name, why=why)

        wrong = tried(self._request, change)
        if wrong:
            return show_tenant(self._request, self._admin, self.tenant, wrong=wrong)
        return RedirectResponse(f"/admin/tenants/{self.tenant}?done={done}", 303)


TenantForm = Annotated[_TenantForm, Depends()]


@router.post("/deposit")
def deposit(
    form: TenantForm,
    kind: Text = "topup",
    amount: Text = "",
    reference: Text = "",
    expires: Text = "",
    scope: Text = "",
    once: Text = "",
) -> Response:
    """Book money in or out.

    `once` is the page's own reference, new each time the page is shown, so a double click books
    once.
    """

    def book(books: Books, **sent: Any) -> None:
        if kind not in list(Booking):
            raise InvalidRequest(f"kind is none of {', '.join(Booking)}")
        balance.book_deposit(books, kind=Booking(kind), **sent)

    return form.change(
        kind,
        book,
        amount=amount,
        reference=reference.strip() or _reference(kind, once),
        expires=expires.strip() or None,
        scope=names_in(scope),
    )


@router.post("/wallet")
def wallet(
    form: TenantForm,
    kind: Text = "topup",
    currency: Text = "",
    amount: Text = "",
    rate: Text = "",
    rate_date: Text = "",
    rate_source: Text = "",
    once: Text = "",
) -> Response:
    """Book money into or out of a wallet, or convert some of one into the balance."""
    at = {"rate": rate, "rate_date": rate_date, "rate_source": rate_source}

    def book(books: Books, **sent: Any) -> None:
        if kind not in ("topup", "withdraw", "convert"):
            raise InvalidRequest("kind must be topup, withdraw or convert")
        if not currency.strip():
            raise InvalidRequest("give the currency of the wallet, such as USD")
        if kind == "convert" and not rate.strip():
            raise InvalidRequest("give the rate: the value of one unit of the wallet's currency")
        if kind == "convert":
            sent |= {name: value.strip() for name, value in at.items()}
        balance.book_deposit(
            books,
            kind=Booking.WITHDRAW if kind == "withdraw" else Booking.TOPUP,
            currency=currency.strip().upper(),
            **sent,
        )

    return form.change("wallet", book, amount=amount, reference=_reference(kind, once))


@router.post("/adjust")
def adjust(form: TenantForm, deposit: Text = "", amount: Text = "", once: Text = "") -> Response:
    """Correct a mistyped top-up or grant."""
    return form.change(
        "adjust",
        balance.adjust_deposit,
        deposit=deposit.strip(),
        amount=amount,
        reference=_reference("adjust", once),
    )


@router.post("/limit")
def limit(form: TenantForm, credit_limit: Text = "") -> Response:
    return form.change("limit", tenants.set_credit_limit, credit_limit=limit_in(credit_limit))


@router.post("/rates")
def rates(
    form: TenantForm,
    requests: Text = "",
    miss_tokens: Text = "",
    output_tokens: Text = "",
    concurrency: Text = "",
    user_requests: Text = "",
    user_miss_tokens: Text = "",
    user_output_tokens: Text = "",
    user_concurrency: Text = "",
) -> Response:
    """Limit requests and tokens a minute; an empty field keeps the limit of the settings."""
    of_tenant = (requests, miss_tokens, output_tokens, concurrency)
    of_user = (user_requests, user_miss_tokens, user_output_tokens, user_concurrency)
    typed = zip(RATE_LIMITS, (*of_tenant, *of_user), strict=True)

    def change(books: Books, **sent: Any) -> None:
        limits = {name: count_in(text) for name, text in typed}
        tenants.set_rate_limits(books, limits=limits, **sent)

    return form.change("rates", change)


@router.post("/state")
def set_state(form: TenantForm, suspended: Text = "") -> Response:
    """Suspend or resume a tenant."""
    if suspended == "yes":
        return form.change("suspend", tenants.suspend_tenant)
    return form.change("resume", tenants.resume_tenant)


@router.post("/budget")
def budget(
    form: TenantForm,
    name: Text = "",
    amount: Text = "",
    per: Text = "month",
    of: Text = "tenant",
    value: Text = "",
    ask: Text = "",
    hard: Text = "",
) -> Response:
    """Set a budget of this tenant; an empty amount removes it."""

    def change(books: Books, *, tenant: str, by: str, why: str) -> None:
        named = name.strip()
        standing = {each["name"]: each["tenant"] for each in budgets.list_budgets(books)}
        if standing.get(named, tenant) != tenant:
            raise InvalidRequest(f"budget {named!r} is another tenant's; choose another name")
        if not amount.strip():
            budgets.remove_budget(books, name=named, by=by, why=why)
            return
        if per not in list(BudgetSpan) or of not in list(Of):
            raise InvalidRequest(
                "a budget is per day, month, balance, topup or spike, for a tenant, key, user "
                "or tag"
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
            hard=hard == "yes",
            by=by,
            why=why,
        )

    return form.change("budget" if amount.strip() else "unbudget", change)


@router.post("/invoice")
def invoice(form: TenantForm, do: Text = "", month: Text = "", number: Text = "") -> Response:
    """Issue a month's invoice, or mark or credit an issued one."""

    def change(books: Books, *, tenant: str, by: str, why: str) -> object:
        if do == "finalize":
            return invoices.finalize_invoice(books, tenant=tenant, month=month, by=by, why=why)
        if number not in {each["number"] for each in invoices.list_invoices(books, tenant=tenant)}:
            raise InvalidRequest(f"tenant {tenant!r} has no invoice of this number")
        if do == "credit":
            return invoices.credit_invoice(books, number=number, by=by, why=why)
        if do not in ("paid", "void"):
            raise InvalidRequest("an invoice is issued, marked paid or void, or credited")
        return invoices.mark_invoice(books, number=number, state=cast(Mark, do), by=by, why=why)

    return form.change(do, change)


def _reference(kind: str, once: str) -> str:
    return f"{kind}_{once or secrets.token_hex(8)}"
