"""Tenants as admins see them. Pure values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

# What an admin may limit of a tenant: three counts a minute, and requests running at once.
RATE_LIMITS: Final = ("requests", "miss_tokens", "output_tokens", "concurrency")
MAX_RATE_LIMIT: Final = 10**12


@dataclass(frozen=True, slots=True)
class Tenant:
    """An account as admins see it. Amounts in units; `available` is what any request may take, None
    is unlimited."""

    tenant: str
    currency: str
    credit_limit: int | None
    suspended: bool
    created_ns: int
    granted: int
    topup: int
    owed: int
    held: int
    seq: int
    scoped: int = 0  # granted for some prices only

    @property
    def prepaid(self) -> bool:
        return self.credit_limit == 0

    @property
    def balance(self) -> int:
        return self.granted + self.scoped + self.topup - self.owed

    @property
    def available(self) -> int | None:
        if self.credit_limit is None:
            return None
        return self.balance - self.scoped + self.credit_limit - self.held

    @property
    def is_out_of_money(self) -> bool:
        return self.available is not None and self.available <= 0 and not self.scoped


def tenant_of(row: Mapping[Any, Any]) -> Tenant:
    """The tenant of a row of accounts."""
    return Tenant(
        tenant=row["tenant"],
        currency=row["currency"],
        credit_limit=row["credit_limit"],
        suspended=row["suspended"],
        created_ns=row["created_ns"],
        granted=row["granted"],
        topup=row["topup"],
        owed=-row["receivable"],
        held=row["held"],
        seq=row["seq"],
        scoped=row["scoped"],
    )
