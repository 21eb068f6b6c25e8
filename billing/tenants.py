"""Tenants as admins see them. Pure values."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

# A tenant's limits that admins can set: three counts per minute, and concurrent requests. Those of
# each of its end users: any of them, 0 too, also divides the tenant's share between its users.
OF_TENANT: Final = ("requests", "miss_tokens", "output_tokens", "concurrency")
OF_USER: Final = tuple(f"user_{name}" for name in OF_TENANT)
RATE_LIMITS: Final = (*OF_TENANT, *OF_USER)
MAX_RATE_LIMIT: Final = 10**12


@dataclass(frozen=True, slots=True)
class Tenant:
    """An account as admins see it. Amounts are in units.

    `available` is the money available to requests; None is unlimited.
    """

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

    @property
    def prepaid(self) -> bool:
        return self.credit_limit == 0

    @property
    def balance(self) -> int:
        return self.granted + self.topup - self.owed

    @property
    def available(self) -> int | None:
        if self.credit_limit is None:
            return None
        return self.balance + self.credit_limit - self.held

    @property
    def is_out_of_money(self) -> bool:
        return self.available is not None and self.available <= 0


def tenant_of(row: Mapping[Any, Any]) -> Tenant:
    """The tenant in a row of accounts."""
    values = {field.name: row[field.name] for field in fields(Tenant) if field.name != "owed"}
    return Tenant(**values, owed=-row["receivable"])
