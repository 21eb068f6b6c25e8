"""The findings of a proof. Values, made by `billing.proof.audit` and `billing.proof.trail`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from billing.errors import BillingError

Head = tuple[int, str]  # number and hash of the last entry of a chain

# Errors from reading a row that somebody changed by hand.
UNREADABLE = (BillingError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class Problem:
    """The first difference in a tenant's chain, or in a projection (`seq` 0)."""

    tenant: str
    seq: int
    invariant: str
    message: str
    request_id: str = ""

    def __str__(self) -> str:
        where = f"entry {self.seq} of tenant {self.tenant!r}" if self.seq else self.tenant
        request = f" (request {self.request_id!r})" if self.request_id else ""
        return f"{where}{request} is not {self.invariant}: {self.message}"


@dataclass(slots=True)
class Proof:
    """The result of `verify`.

    `heads` are those of the tenants' chains and of the admin trail, to store elsewhere and compare.
    """

    num_entries: int = 0
    num_tenants: int = 0
    problems: list[Problem] = field(default_factory=list)
    heads: dict[str, Head] = field(default_factory=dict)
    revenue: dict[str, int] = field(default_factory=dict)  # by currency

    @property
    def ok(self) -> bool:
        return not self.problems


def readable(what: str, check: Callable[[], Iterable[Problem]]) -> list[Problem]:
    """The problems that a check finds. Unreadable data is a problem too."""
    found: list[Problem] = []
    try:
        found.extend(check())
    except UNREADABLE as error:
        found.append(Problem(what, 0, "readable", f"{type(error).__name__}: {error}"))
    return found
