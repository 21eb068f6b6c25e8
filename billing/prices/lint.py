"""Finds rate cards that can be gamed, lose money or are misleading. Pure.

An error stops `prices apply`; a warning is only shown. A rule compares prices within one model and
window, because a request is pinned to these. An hour of a pin is an exception: it lasts into the
window after the one that priced it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum
from functools import partial
from itertools import combinations, pairwise

from billing.money import rate_per_million as _rate
from billing.prices.book import STANDARD, ModelPrice, RateCard, Rates, Window, most_specific
from billing.usage import HIT_CLASSES, WRITES


class Severity(StrEnum):
    """An error keeps a card from being applied; a warning does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class CardFinding:
    """What a rule found wrong in a rate card, and where."""

    level: Severity
    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.message} [{self.rule}]"


_error, _warning = partial(CardFinding, Severity.ERROR), partial(CardFinding, Severity.WARNING)

MOST_MINIMUM = 4096  # tokens; public price lists have 64 to 4,096


def lint(card: RateCard) -> list[CardFinding]:
    """All findings, errors first."""
    findings = [*_patterns(card), *_windows(card), *_minimum(card), *_costs(card), *_factors(card)]
    for price in card.models:
        for length, rates in price.above.items():
            where = f"model {price.pattern!r}, prompts above {length:,} tokens"
            findings += [*_hits(where, rates), *_free(where, rates), *_write(where, rates)]
        findings += _lengths(price)
        for window, rates in price.rates.items():
            where = f"model {price.pattern!r}, window {window}"
            findings += [*_hits(where, rates), *_free(where, rates), *_write(where, rates)]
            findings += _pins(where, window, price)
    return sorted(findings, key=lambda finding: finding.level != Severity.ERROR)


def _cheapest_hit(rates: Rates) -> int:
    return min(rates.of(name) for name in HIT_CLASSES)


def _hits(where: str, rates: Rates) -> Iterator[CardFinding]:
    hits = [(name, rates.of(name)) for name in HIT_CLASSES]  # hottest tier first
    for name, price in [*hits, ("explicit_hit", rates.hit_device + rates.explicit_hit)]:
        if price > rates.miss:
            message = f"{name} costs {_rate(price)} and a miss {_rate(rates.miss)}"
            yield _error("hit-above-miss", where, f"{message}: clients would avoid the cache")
    for (hotter, price), (colder, less) in pairwise(hits):
        if less < price:
            yield _warning(
                "cold-below-hot",
                where,
                f"{colder} ({_rate(less)}) costs less than {hotter} ({_rate(price)}): clients gain "
                "by letting blocks cool",
            )


def _free(where: str, rates: Rates) -> Iterator[CardFinding]:
    if _cheapest_hit(rates) == 0 and rates.miss:
        yield _warning("free-hits", where, "hits are free: only rate limits bound them")
    pins = rates.storage if rates.storage_minute is None else rates.storage_minute
    free = {"computed prompts": rates.miss, "output": rates.output, "pins": pins}
    names = " and ".join(name for name, price in free.items() if price == 0)
    if names:
        yield _warning("free", where, f"free: {names}; only rate limits bound them")


def _write(where: str, rates: Rates) -> Iterator[CardFinding]:
    if rates.cache_write and rates.cache_write + _cheapest_hit(rates) > rates.miss:
        yield _warning(
            "write-never-pays",
            where,
            "with its write price, a prefix used twice costs more cached than not",
        )
    if rates.of("unreported") < 0:
        yield _warning(
            "unreported-below-miss",
            where,
            "unreported prompts cost less than computed ones: clients gain by leaving early",
        )
    if rates.explicit_hit < 0 and rates.explicit_write > rates.cache_write:
        yield _warning(
            "write-then-mark",
            where,
            "explicit hits cost less, and explicit writes more: clients gain by marking a prefix "
            "only once it is written",
        )


def _hour(rates: Rates) -> int | None:
    """The price of pinning a token for an hour; None if pins are not sold."""
    return rates.storage if rates.storage_minute is None else 60 * rates.storage_minute


def _pins(where: str, window: str, price: ModelPrice) -> Iterator[CardFinding]:
    rates = price.rates[window]
    hit, mine = _cheapest_hit(rates), _hour(rates)
    if mine is None and any(_hour(r) is not None for r in price.rates.values()):
        message = "storage has a price in other windows only: clients gain by pinning in this one"
        yield _warning("pin-across-windows", where, message)
    for begun, other in price.rates.items():
        hour = _hour(other)
        if hour is None or hour + hit >= rates.miss:
            continue
        sums = f"({_rate(hour)}) and a hit ({_rate(hit)}) cost less than one miss"
        if begun == window:
            message = f"an hour of storage {sums} ({_rate(rates.miss)}): pinning all would pay"
            yield _error("pin-below-miss", where, message)
        elif hour < (mine or 0):
            message = (
                f"an hour of storage that begins in window {begun} {sums} ({_rate(rates.miss)}) "
                "here: clients gain by pinning just before the windows change"
            )
            yield _warning("pin-across-windows", where, message)


def _costs(card: RateCard) -> Iterator[CardFinding]:
    """Prices below the card's own costs, for each kind of model the patterns distinguish."""
    seen: set[tuple[str, str]] = set()
    for pattern in [price.pattern for price in (*card.models, *card.costs)]:
        model = pattern.replace("*", "\0")  # a name that matches only prefixes
        price, cost = card.price_of(model), most_specific(card.costs, model)
        if price and cost and (price.pattern, cost.pattern) not in seen:
            seen.add((price.pattern, cost.pattern))
            for window, rates in price.rates.items():
                where = f"model {pattern!r}, window {window}"
                yield from _below(where, rates, cost.rates[STANDARD])


def _below(where: str, rates: Rates, cost: Rates) -> Iterator[CardFinding]:
    for name in (*HIT_CLASSES, "miss", "output", *WRITES, "storage", "storage_minute"):
        asked, paid = getattr(rates, name), getattr(cost, name)
        if asked is not None and paid is not None and asked < paid:
            yield _error(
                "below-cost", where, f"{name} is sold at {_rate(asked)} and costs {_rate(paid)}"
            )


def _lengths(price: ModelPrice) -> Iterator[CardFinding]:
    """Longer prompts that cost less in total, which clients would reach by padding."""
    before = price.rates[STANDARD]
    for length, rates in sorted(price.above.items()):
        if rates.miss < before.miss or _cheapest_hit(rates) < _cheapest_hit(before):
            message = f"prompts above {length:,} tokens cost less a token: clients gain by padding"
            yield _warning("longer-is-cheaper", f"model {price.pattern!r}", message)
        before = rates


def _factors(card: RateCard) -> Iterator[CardFinding]:
    """Groups and service tiers that are free or sold below the card's stated cost."""
    for group in card.groups:
        where = f"group {group.name!r}"
        if group.factor == 0 and group.until_ns is None:
            message = "everything is free for ever; give it `until`"
            yield _warning("free", where, message)
    factors = {f"group {group.name!r}": group.factor for group in card.groups if group.factor}
    factors |= {f"service {name!r}": factor for name, factor in card.services.items()}
    for where, factor in factors.items():
        for price in card.models:
            cost = most_specific(card.costs, price.pattern.replace("*", "\0"))
            for rates in (*price.rates.values(), *price.above.values()):
                if cost is not None:
                    yield from _below(where, rates.times(factor), cost.rates[STANDARD])


def _minimum(card: RateCard) -> Iterator[CardFinding]:
    if card.minimum_cached_tokens > MOST_MINIMUM:
        yield _warning(
            "large-minimum",
            "card",
            f"hits of fewer than {card.minimum_cached_tokens:,} tokens cost as much as misses: "
            "clients gain by padding their prompts",
        )
    for price in card.models:
        if any(0 < rates.minimum <= rates.request for rates in price.rates.values()):
            yield _warning(
                "minimum-without-effect",
                price.pattern,
                "the fee counts towards the minimum of a request and reaches it alone: leave the "
                "minimum out, or say what fee and tokens come to together",
            )


def _patterns(card: RateCard) -> Iterator[CardFinding]:
    if not any(price.pattern == "*" for price in card.models):
        yield _warning(
            "no-default",
            "models",
            'no [[model]] matches "*": requests for other models are refused',
        )


def _windows(card: RateCard) -> Iterator[CardFinding]:
    """Overlapping windows. The first listed wins, which a reader may overlook."""
    monday = date(2024, 1, 1)
    week = [monday + timedelta(days=number) for number in range(8)]
    around = {day + timedelta(days=off) for day in card.holidays for off in (-1, 0, 1)}
    for first, second in combinations(card.windows, 2):
        usual = _overlap(first, second, week, frozenset())
        if usual or _overlap(first, second, around, card.holidays):
            when = "" if usual else " on a holiday"
            message = f"they are open at the same time{when}; a request would have two prices"
            where = f"windows {first.name!r} and {second.name!r}"
            yield _error("windows-overlap", where, message)


def _overlap(first: Window, second: Window, days: Iterable[date], off: frozenset[date]) -> bool:
    return any(
        a[0] < b[1] and b[0] < a[1]
        for day in days
        for a in first.spans(day, off)
        for b in second.spans(day, off)
    )
