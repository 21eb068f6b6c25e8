"""Usage times price: the one place where a charge is computed. Pure; any thread.

Settlement, audit and plans all use `rate`, so charges cannot differ between implementations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from billing.prices.book import PinnedRate, Rates
from billing.usage import CLASSES, HIT_CLASSES, RELATIVE, WRITES, Usage


@dataclass(frozen=True, slots=True)
class Line:
    """One class of a charge: `tokens * per_token == amount`, in units."""

    name: str
    tokens: int
    per_token: int
    amount: int


@dataclass(frozen=True, slots=True)
class Charge:
    """The cost of a usage. `saved` is the price of its tokens without a cache minus this cost.

    `fees` is the part of the amount not for tokens: the request's fee and the addition up to a
    minimum.
    """

    lines: tuple[Line, ...]
    amount: int
    saved: int
    currency: str
    fees: int = 0


def charge_in(details: Mapping[str, Any], pinned: PinnedRate) -> Charge:
    """The charge in an entry's body."""
    return rate(Usage.from_record(details.get("usage", {})), pinned)


def rate(usage: Usage, pinned: PinnedRate) -> Charge:
    """The charge for `usage`. Hits below the card's minimum cached size are priced as misses."""
    rates = pinned.rates
    counts_as_hit = usage.hit >= pinned.minimum_cached_tokens
    lines: list[Line] = []
    for name in CLASSES:
        if not (tokens := getattr(usage, name)):
            continue
        is_plain = name in RELATIVE and not rates.of(name)
        if is_plain or (name == "explicit_hit" and not counts_as_hit):
            continue  # priced like other hits or misses
        is_short = name in HIT_CLASSES and not counts_as_hit
        per_token = rates.miss if is_short else rates.of(name)
        lines.append(Line(name, tokens, per_token, tokens * per_token))
    of_tokens = sum(line.amount for line in lines)
    prompt = usage.prompt
    fees = _fees(lines, of_tokens, rates) if prompt or usage.output else 0
    uncached = prompt * rates.miss + usage.output * rates.output
    uncached += usage.unreported * rates.of("unreported")
    saved = uncached - of_tokens
    return Charge(tuple(lines), of_tokens + fees, saved, pinned.currency, fees)


def short_hits(usage: Usage, pinned: PinnedRate) -> str | None:
    """Why hits cost as much as misses; None if they do not."""
    least = pinned.minimum_cached_tokens
    if not usage.hit or usage.hit >= least:
        return None
    hits = "1 hit" if usage.hit == 1 else f"{usage.hit} hits"
    return f"{hits}, fewer than the card's {least}: priced as misses"


def _fees(lines: list[Line], of_tokens: int, rates: Rates) -> int:
    """Adds the request's fee and the difference to the minimum price of a request."""
    fee = rates.request
    if fee:
        lines.append(Line("request", 1, fee, fee))
    missing = max(0, rates.minimum - of_tokens - fee)
    if missing:
        lines.append(Line("minimum", 1, missing, missing))
    return fee + missing


def hold_amount(pinned: PinnedRate, *, prompt_tokens: int, output_tokens: int) -> int:
    """The amount to hold so that this prompt and this much output is certainly covered.

    The prompt is held at the highest price of a prompt token (a miss with its cache write), plus
    the fee and up to the minimum of a request. Without a prompt it is a further slice of output.
    """
    rates = pinned.rates
    hit = max(rates.of(name) for name in HIT_CLASSES)
    more = max(*(rates.of(name) for name in WRITES), rates.of("unreported"))
    dearest = max(rates.miss + more, hit + max(0, rates.explicit_hit))
    amount = prompt_tokens * dearest + output_tokens * rates.output
    return max(amount + rates.request, rates.minimum) if prompt_tokens else amount
