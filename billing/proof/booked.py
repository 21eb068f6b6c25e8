"""An entry as the checks of `billing.proof` see it, and the error they raise."""

from typing import Any, NamedTuple

from billing.gate.entries import ACCOUNTS, Entry
from billing.gate.work import TenantAccount
from billing.money import format_units


class Differs(Exception):
    """An entry breaks an invariant, named as in `billing.proof.audit`."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant


class Booked(NamedTuple):
    """A decoded entry. `account` is the account before it."""

    entry: Entry
    account: TenantAccount
    postings: dict[str, int]
    details: dict[str, Any]


def same(invariant: str, found: dict[str, int], expected: dict[str, int]) -> None:
    """Raises `Differs` if postings are not as expected."""
    for name in ACCOUNTS:
        if found.get(name, 0) != expected.get(name, 0):
            raise Differs(
                invariant,
                f"it moves {format_units(found.get(name, 0))} on {name}; "
                f"expected {format_units(expected.get(name, 0))}",
            )
