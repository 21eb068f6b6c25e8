"""Usage times price: the one place where a charge is computed. Pure; any thread, any time again.

`rate` is used at settlement, at audit and in a plan, so a charge that differs is never a matter of
two implementations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from billing.prices.book import PinnedRate, Rates
from billing.usage import CLASSES, HIT_CLASSES, Usage

INCLUDED = "included_"  # before a class: its tokens that cost nothing, below zero


@dataclass(frozen=True, slots=True)
class Line:
    """One class of a charge: `tokens * per_token == amount`, in units."""

    name: str
    tokens: int
    per_token: int
    amount: int


@dataclass(frozen=True, slots=True)
class Charge:
    """What a usage costs. `saved` is the price of its tokens without any cache less this one.

    `fees` is what of the amount is no token's: the request's fee, and what a minimum adds.
    `included` is what its included tokens would have cost, `taken` how many of each item they are.
    """

    lines: tuple[Line, ...]
    amount: int
    saved: int
    currency: str
    fees: int = 0
    included: int = 0
    taken: Mapping[str, int] = field(default_factory=dict)


def rate(usage: Usage, pinned: PinnedRate, left: Mapping[str, int] | None = None) -> Charge:
    """The charge for `usage`. Hits below the card's minimum cached size are priced as misses.

    `left` is how many included tokens there are, by item; those that a charge took give it again.
    """
    rates = pinned.rates
    counts_as_hit = usage.hit >= pinned.minimum_cached_tokens
    lines: list[Line] = []
    for name in CLASSES:
        if not (tokens := getattr(usage, name)):
            continue
        if name == "explicit_hit" and not (counts_as_hit and rates.explicit_hit):
            continue  # it costs what other hits cost
        is_short = name in HIT_CLASSES and not counts_as_hit
        _add(lines, name, tokens, rates.miss if is_short else rates.of(name))
    of_tokens = sum(line.amount for line in lines)
    prompt = usage.prompt
    fees = _fees(lines, of_tokens, rates) if prompt or usage.output else 0
    uncached = prompt * rates.miss + usage.output * rates.output
    saved = uncached - of_tokens
    taken = _include(lines, pinned, left) if left else {}
    included = -sum(line.amount for line in lines if line.name.startswith(INCLUDED))
    amount = of_tokens + fees - included
    return Charge(tuple(lines), amount, saved, pinned.currency, fees, included, taken)


def _include(lines: list[Line], pinned: PinnedRate, left: Mapping[str, int]) -> dict[str, int]:
    """Take the included tokens off again, item by item; gives how many of each."""
    priced = {line.name: line for line in lines}
    open_tokens = {name: line.tokens for name, line in priced.items()}
    taken: dict[str, int] = {}
    for item in pinned.included:
        for name in item.classes:
            covered = min(
                left.get(item.name, 0) - taken.get(item.name, 0), open_tokens.get(name, 0)
            )
            if covered > 0:
                open_tokens[name] -= covered
                taken[item.name] = taken.get(item.name, 0) + covered
    for name, line in priced.items():
        _add(lines, INCLUDED + name, open_tokens[name] - line.tokens, line.per_token)
    return taken


def _fees(lines: list[Line], of_tokens: int, rates: Rates) -> int:
    """Add the request's fee, and what is missing to the least that a request costs."""
    fee = rates.request
    if fee:
        lines.append(Line("request", 1, fee, fee))
    missing = max(0, rates.minimum - of_tokens - fee)
    if missing:
        lines.append(Line("minimum", 1, missing, missing))
    return fee + missing


def _add(lines: list[Line], name: str, tokens: int, per_token: int) -> None:
    if tokens:
        lines.append(Line(name, tokens, per_token, tokens * per_token))


def hold_amount(pinned: PinnedRate, *, prompt_tokens: int, output_tokens: int) -> int:
    """What must be held so that this prompt and this much output is surely covered.

    The prompt is held at the dearest a prompt token can be (a miss, with its cache write), with the
    fee and the minimum of a request. Without a prompt it is a further slice of output.
    """
    rates = pinned.rates
    hit = max(rates.hit_device, rates.hit_host, rates.hit_disk, rates.hit_remote)
    write = max(rates.cache_write, rates.explicit_write, rates.cache_write_1h)
    dearest = max(rates.miss + write, hit + max(0, rates.explicit_hit))
    amount = prompt_tokens * dearest + output_tokens * rates.output
    return max(amount + rates.request, rates.minimum) if prompt_tokens else amount
