"""Bodies of the admin routes that change money. Types are strict and unknown fields are refused.

Each has a `why`, which goes into the audit log.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from billing.alerts.budgets import BudgetSpan, Of
from billing.keys import DEFAULT_SCOPES, Scope
from billing.tenants import MAX_RATE_LIMIT, RATE_LIMITS

Why = Annotated[str, Field(min_length=1, max_length=500, description="Kept in the audit log")]
Name = Annotated[str, Field(min_length=1, max_length=64)]
Text = Annotated[str, Field(max_length=200)]
Amount = Annotated[str, Field(max_length=60, description="A decimal, such as 12.50")]


class AdminBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    why: Why

    @field_validator("why")
    @classmethod
    def _says_something(cls, why: str) -> str:
        if not any(map(str.isalnum, why)):
            raise ValueError("say why; the audit log keeps it")
        return why.strip()


class NewTenant(AdminBody):
    tenant: Name
    currency: str | None = Field(None, description="Three capitals; without it, the card's own")
    credit_limit: Amount | None = Field(
        "0", description="0 is prepaid, an amount is postpaid up to it, null is unlimited"
    )


class CreditLimit(AdminBody):
    credit_limit: Amount | None = Field(description="0 is prepaid, null is unlimited")


class NewRateLimits(AdminBody):
    limits: dict[
        Annotated[str, Field(max_length=32)],
        Annotated[int, Field(ge=0, le=MAX_RATE_LIMIT)] | None,
    ] = Field(
        min_length=1,
        max_length=len(RATE_LIMITS),
        description="requests, miss_tokens and output_tokens a minute, and concurrency; "
        "0 is no limit, null is as the settings say, what is not named stays",
    )


class NewProject(AdminBody):
    project: Name


class NewKey(AdminBody):
    tenant: Name
    project: Text = ""
    name: Text = ""
    scopes: list[Literal["inference", "usage", "admin"]] = Field(
        default_factory=lambda: [scope.value for scope in Scope if scope in DEFAULT_SCOPES],
        min_length=1,
    )
    expires_in_s: int | None = Field(None, gt=0, le=100 * 366 * 86_400)


class NewDeposit(AdminBody):
    amount: Amount
    reference: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="Your own id of the payment. It is booked once, however often you send it"
    )
    expires: Annotated[str, Field(max_length=10)] | None = Field(
        None, description="Of a grant: its last day (UTC), such as 2027-01-31 or 90d"
    )
    scope: list[Text] | None = Field(
        None,
        max_length=20,
        description="Of a grant: the prices that spend it, each MODEL or MODEL@TERM",
    )
    currency: Annotated[str, Field(max_length=3)] | None = Field(
        None, description="Another than the tenant's: into its wallet, or out of it"
    )
    rate: Annotated[str, Field(max_length=40)] | None = Field(
        None, description="With a top-up: converts so much of the wallet into the balance"
    )
    rate_date: Annotated[str, Field(max_length=10)] | None = None
    rate_source: Annotated[str, Field(max_length=200)] | None = None


class Adjustment(AdminBody):
    deposit: Annotated[str, Field(min_length=1, max_length=200, description="Its reference")]
    amount: Amount = Field(description="What it should have been; 0 undoes it")
    reference: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class Correction(AdminBody):
    tenant: Name
    request_id: Text
    amount: Amount | None = Field(None, description="Gives back so much; without it, all of it")
    reference: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class CorrectionOf(BaseModel):
    """One correction in a batch."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    tenant: Name
    request_id: Text
    amount: Amount | None = None
    reference: Annotated[str, Field(min_length=1, max_length=200)]


class Corrections(AdminBody):
    corrections: list[CorrectionOf] = Field(max_length=1000)


class NewBudget(AdminBody):
    tenant: Name
    amount: Amount
    per: BudgetSpan = Field(BudgetSpan.MONTH, strict=False)
    of: Of = Field(Of.TENANT, strict=False)
    value: Text = Field("", description="The key's id, the user, or NAME=VALUE of a tag")
    ask: Amount | Literal[""] = Field("", description="Per topup: the top-up to ask for")
    most: int = Field(0, ge=0, le=100, description="Per topup: how often a day; 0 is 3")


class NewInvoice(AdminBody):
    tenant: Name
    month: Annotated[str, Field(max_length=7, description="Such as 2026-11")]


class InvoiceMark(AdminBody):
    state: Literal["paid", "void"]


class NewParties(AdminBody):
    toml: Annotated[str, Field(max_length=1 << 20, description="[seller] and a [[buyer]] each")]


class CardSource(BaseModel):
    """A rate card: its TOML, or the name of a built-in or applied card."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    toml: Annotated[str, Field(max_length=100_000)] | None = None
    name: Name | None = None
    version: Name | None = Field(None, description="Of a card that was applied")


class PlanBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    card: CardSource
    days: int = Field(30, ge=1, le=3660)
    tenant: Name | None = None


class ApplyCard(AdminBody):
    card: CardSource
