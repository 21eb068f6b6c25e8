"""Scoped grants, for some prices only: which fit a request, and what is left of each. Pure.

The scope of a grant lists prices. `MODEL` is a model, or with a final `*` all models with that
prefix. `MODEL@TERM` is that model if its price has this term: a window, a group of tenants or a
service tier. The account `scoped` is the sum of what is left of these grants.

A hold counts the grants that fit its price. Requests of several prices may need the same grant. So
a hold is given only if, for each price with holds, the balance and the grants that fit that price
cover everything held. Then every request is covered, in whatever order they settle.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from billing.errors import InvalidName
from billing.names import check_text
from billing.prices.book import AND, MONTHLY, STANDARD, PriceBook, RateCard, RateRef, fits

MOST = 20  # prices in one scope
_AT = "@"


@dataclass(slots=True)
class ScopedGrant:
    """`seq` is the number of the grant's entry."""

    seq: int
    reference: str
    scope: tuple[str, ...]
    expires_ns: int
    left: int = 0

    @property
    def order(self) -> tuple[int, int]:
        return self.expires_ns, self.seq


ScopedGrants = Mapping[int, ScopedGrant]  # by number


def covers(scope: Iterable[str], ref: RateRef) -> bool:
    """Whether a request at this price may spend the grant. False for a month's minimum."""
    terms = ref.window.split(AND)
    for each in scope:
        model, _, term = each.partition(_AT)
        if fits(model, ref.model) and (not term or term in terms):
            return ref.window != MONTHLY
    return False


def fitting(grants: ScopedGrants, ref: RateRef) -> list[ScopedGrant]:
    """The grants that a request may spend, in the order of spending."""
    found = (grant for grant in grants.values() if grant.left > 0 and covers(grant.scope, ref))
    return sorted(found, key=lambda grant: grant.order)


def reach(grants: ScopedGrants, ref: RateRef) -> int:
    """The amount of scoped grants that a request may spend."""
    return sum(grant.left for grant in fitting(grants, ref))


def taken_from(grants: ScopedGrants, ref: RateRef, amount: int) -> dict[int, int]:
    """What a charge takes from each fitting grant, earliest expiry first."""
    taken: dict[int, int] = {}
    for grant in fitting(grants, ref):
        part = min(amount, grant.left)
        if part:
            taken[grant.seq] = part
            amount -= part
    return taken


def given_back(grants: ScopedGrants, taken: Mapping[int, int], amount: int) -> dict[int, int]:
    """How `amount` is returned to the grants a charge took from, last one first."""
    back: dict[int, int] = {}
    for grant in sorted((grants[seq] for seq in taken), key=lambda g: g.order, reverse=True):
        part = min(amount, taken[grant.seq])
        if part:
            back[grant.seq] = part
            amount -= part
    return back


def scoped_body(moved: Mapping[int, int], sign: int = 1) -> dict[str, object]:
    """The scoped grants moved by an entry, for its body."""
    return {"scoped": {str(seq): str(sign * units) for seq, units in moved.items() if units}}


def moved_by(details: Mapping[str, object]) -> dict[int, int]:
    """The amounts an entry moves on each grant, from its body; the inverse of `scoped_body`."""
    moved = details.get("scoped", {})
    assert isinstance(moved, dict), moved
    return {int(seq): int(units) for seq, units in moved.items()}


def check_scope(scope: Sequence[str], book: PriceBook, currency: str) -> tuple[str, ...]:
    """The scope without repeats. Raises `InvalidName` for a price that no card has."""
    if len(scope) > MOST:
        raise InvalidName(f"a grant's scope lists at most {MOST} prices, and this one {len(scope)}")
    cards = [card for card in book.cards if card.currency == currency]
    for each in scope:
        model, at, term = each.partition(_AT)
        check_text(each, "scope")
        if not model or (at and not term):
            raise InvalidName(f"scope {each!r}: write MODEL or MODEL@TERM; * is every model")
        if not model.endswith("*") and not any(card.price_of(model) for card in cards):
            raise InvalidName(f"scope {each!r}: no rate card in {currency} prices model {model!r}")
        if term and not any(term in _terms(card) for card in cards):
            raise InvalidName(
                f"scope {each!r}: no rate card in {currency} has a window, group or service tier "
                f"{term!r}"
            )
    return tuple(dict.fromkeys(scope))


def _terms(card: RateCard) -> set[str]:
    windows, groups = (window.name for window in card.windows), (g.name for g in card.groups)
    return {STANDARD, *windows, *groups, *card.services}


def scope_of(details: Mapping[str, object]) -> tuple[str, ...]:
    """The scope in the body of a grant; empty means everything."""
    scope = details.get("scope", ())
    assert isinstance(scope, list | tuple), scope
    return tuple(scope)
