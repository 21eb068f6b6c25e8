"""`cachesvc tenants`: the customers who are billed, their credit, limits and projects."""

import time
from typing import Annotated

import typer

from billing.operations import prices, tenants
from billing.reports.documents import Document
from billing.tenants import RATE_LIMITS
from cachesvc.cli.lazy import Command, lazy_group
from cachesvc.cli.money.books import TenantName
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.render import (
    Column,
    confirm,
    fail,
    note,
    print_documents,
    print_json,
    print_pairs,
)

_HERE = "cachesvc.cli.money.tenants"
app = lazy_group(
    {
        "create": Command(f"{_HERE}:create", "Create a tenant"),
        "show": Command(f"{_HERE}:show", "Show one tenant, or list all"),
        "set": Command(f"{_HERE}:set_", "Change a tenant's credit, limits, status or projects"),
        "budget": Command("cachesvc.cli.money.budgets:budget", "Refuse what would pass an amount"),
    },
    help="Create, show and change tenants",
)

Limit = Annotated[
    str | None,
    typer.Option("--postpaid", metavar="AMOUNT", help="Postpaid up to this amount, or `unlimited`"),
]


@operating("reason", "json", create=True)
def create(
    call: Invocation,
    tenant: TenantName,
    currency: Annotated[
        str | None, typer.Option(help="That of a rate card [newest card's]")
    ] = None,
    postpaid: Limit = None,
) -> None:
    """Create a tenant. It is prepaid unless --postpaid gives it credit."""
    credit = "0" if postpaid is None else credit_limit(postpaid)
    given = {"tenant": tenant, "currency": currency, "credit_limit": credit}
    made = call.change(tenants.create_tenant, **given)
    print_tenant(made, call.json)
    if currency is None and not call.json:
        note(f"it is charged in {made['currency']}, as the newest rate card; --currency chooses")
    _warn_unpriced(made["currency"], call(prices.applied_cards), call.json)


@operating("json")
def show(
    call: Invocation,
    tenant: Annotated[str | None, typer.Argument(help="Name of the tenant  [all]")] = None,
) -> None:
    """Show one tenant, its projects and its balance; or list all tenants."""
    if tenant is not None:
        print_tenant(call(tenants.show_tenant, tenant=tenant), call.json)
        return
    columns: dict[str, Column] = {
        "tenant": lambda each: each["tenant"] + (" (suspended)" if each["suspended"] else ""),
        "kind": lambda each: "prepaid" if each["prepaid"] else "postpaid",
        "currency": "currency",
        "granted": "granted",
        "topped up": "topped_up",
        "owed": "owed",
        "held": "held",
        "available": lambda each: each["available"] or "unlimited",
    }
    found, spare = call(tenants.list_tenants), ("held", "granted", "topped up")
    print_documents(found, call.json, columns, right=tuple(columns)[3:], spare=spare)


@operating("reason", "yes", "json")
def set_(
    call: Invocation,
    tenant: TenantName,
    postpaid: Annotated[
        str | None,
        typer.Option(metavar="AMOUNT", help="Credit: 0 for prepaid, an amount, or `unlimited`"),
    ] = None,
    currency: Annotated[
        str | None, typer.Option(help="That of a rate card; only while nothing is booked")
    ] = None,
    suspended: Annotated[
        bool | None,
        typer.Option(
            "--suspend/--resume",
            help="Refuse new requests while running ones finish; or accept them again",
        ),
    ] = None,
    project: Annotated[
        str | None, typer.Option("--add-project", help="Add a project, to split usage by")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help=(
                "NAME=COUNT: requests, miss_tokens, output_tokens (a minute) or concurrency; with "
                "user_ before it, of each end user; 0 is no limit, `default` is the setting. "
                "Repeatable"
            ),
        ),
    ] = None,
) -> None:
    """Change a tenant's credit, currency, limits, status or projects."""
    if {postpaid, currency, suspended, project} == {None} and not limit:
        fail("say what to change: an option of `cachesvc tenants set --help`", 2)
    if currency is not None:
        call.change(tenants.set_currency, tenant=tenant, currency=currency)
    limits = dict(map(rate_limit, limit or ()))
    if postpaid is not None:
        credit = credit_limit(postpaid)
        if call.asks:
            confirm(f"Let {tenant} owe up to {postpaid}?", yes=False)
        call.change(tenants.set_credit_limit, tenant=tenant, credit_limit=credit)
    if limits:
        call.change(tenants.set_rate_limits, tenant=tenant, limits=limits)
    if suspended is not None:
        call.change(tenants.suspend_tenant if suspended else tenants.resume_tenant, tenant=tenant)
    if project is not None:
        call.change(tenants.create_project, tenant=tenant, project=project)
    print_tenant(call(tenants.show_tenant, tenant=tenant), call.json)


def credit_limit(text: str) -> str | None:
    """A credit limit for operations; None is unlimited."""
    return None if text == "unlimited" else text


def rate_limit(text: str) -> tuple[str, int | None]:
    """A limit for operations; None means the settings' limit."""
    name, _, value = text.partition("=")
    if value == "default":
        return name, None
    if name not in RATE_LIMITS or not (value.isascii() and value.isdigit()):
        fail(
            f"--limit {text!r}: write NAME=N or NAME=default, with NAME one of "
            f"{', '.join(RATE_LIMITS)}",
            2,
        )
    return name, int(value)


def print_tenant(values: Document, json: bool) -> None:
    if json:
        print_json(values)
        return
    unlimited = {"credit_limit", "available"}
    shown = {k: "unlimited" if v is None and k in unlimited else v for k, v in values.items()}
    if "projects" in shown:
        shown["projects"] = " ".join(values["projects"]) or None
    if "rate_limits" in shown:
        set_here = [f"{name}={n or 'none'}" for name, n in values["rate_limits"].items()]
        shown["rate_limits"] = " ".join(set_here) or None
    if "grants" in shown:
        left = (f"{each['reference']} {each['left']}" for each in values["grants"])
        shown["grants"] = ", ".join(left) or None
        limits = (f"{e['name']} {e['left']} of {e['amount']}" for e in values["spend_limits"])
        shown["spend_limits"] = ", ".join(limits) or None
    print_pairs(shown)


def _warn_unpriced(currency: str, cards: list[Document], json: bool) -> None:
    """Warns if no card has prices in this currency yet."""
    now_ns = time.time_ns()
    begin_ns = [card["valid_from_ns"] for card in cards if card["currency"] == currency]
    if begin_ns and min(begin_ns) > now_ns:
        note(f"no rate card in {currency} is in force yet: until then its requests are refused")
    elif not cards and not json:
        note("the server's first start puts the launch card in force, unless another is applied")
