"""Finds rate cards that can be gamed, that lose money, or that do not say what they seem to. Pure.

An error stops `prices apply`; a warning is shown. A rule compares prices within one model and
window, because that is what a request is pinned to; an hour of a pin, though, lasts into the window
after the one that priced it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum
from itertools import pairwise

from billing.money import rate_per_million
from billing.prices.book import STANDARD, ModelPrice, RateCard, Rates, Window, most_specific
from billing.usage import HIT_CLASSES


class Level(StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.message} [{self.rule}]"


MOST_MINIMUM = 4096  # tokens; the public price lists ask for 64 to 4,096


def lint(card: RateCard) -> list[Finding]:
    """All findings, errors first."""
    findings = [*_patterns(card), *_windows(card), *_minimum(card), *_costs(card)]
    for price in card.models:
        for window, rates in price.rates.items():
            where = f"model {price.pattern!r}, window {window}"
            findings += [*_hits(where, rates), *_free(where, rates), *_write(where, rates)]
            findings += _pins(where, window, price)
    return sorted(findings, key=lambda finding: finding.level != Level.ERROR)


def _cheapest_hit(rates: Rates) -> int:
    return min(rates.hit_device, rates.hit_host, rates.hit_disk, rates.hit_remote)


def _hits(where: str, rates: Rates) -> Iterator[Finding]:
    hits = [(name, getattr(rates, name)) for name in HIT_CLASSES]  # from the hottest tier down
    for name, price in hits:
        if price > rates.miss:
            yield Finding(
                Level.ERROR,
                "hit-above-miss",
                where,
                f"{name} costs {_rate(price)} and a miss {_rate(rates.miss)}: clients would avoid "
                "the cache",
            )
    for (hotter, price), (colder, less) in pairwise(hits):
        if less < price:
            yield Finding(
                Level.WARNING,
                "cold-below-hot",
                where,
                f"{colder} ({_rate(less)}) costs less than {hotter} ({_rate(price)}): clients gain "
                "by letting blocks cool",
            )


def _free(where: str, rates: Rates) -> Iterator[Finding]:
    if _cheapest_hit(rates) == 0 and rates.miss:
        yield Finding(
            Level.WARNING, "free-hits", where, "hits are free: only rate limits bound them"
        )
    free = {"computed prompts": rates.miss, "output": rates.output, "pins": rates.storage}
    names = " and ".join(name for name, price in free.items() if price == 0)
    if names:
        yield Finding(Level.WARNING, "free", where, f"free: {names}; only rate limits bound them")


def _write(where: str, rates: Rates) -> Iterator[Finding]:
    if rates.cache_write and rates.cache_write + _cheapest_hit(rates) > rates.miss:
        yield Finding(
            Level.WARNING,
            "write-never-pays",
            where,
            "with its write price, a prefix used twice costs more cached than not",
        )


def _pins(where: str, window: str, price: ModelPrice) -> Iterator[Finding]:
    rates = price.rates[window]
    hit = _cheapest_hit(rates)
    if rates.storage is None and any(r.storage is not None for r in price.rates.values()):
        message = "storage has a price in other windows only: clients gain by pinning in this one"
        yield Finding(Level.WARNING, "pin-across-windows", where, message)
    for begun, other in price.rates.items():
        if other.storage is None or other.storage + hit >= rates.miss:
            continue
        sums = f"({_rate(other.storage)}) and a hit ({_rate(hit)}) cost less than one miss"
        if begun == window:
            message = f"an hour of storage {sums} ({_rate(rates.miss)}): pinning all would pay"
            yield Finding(Level.ERROR, "pin-below-miss", where, message)
        elif other.storage < (rates.storage or 0):
            message = (
                f"an hour of storage that begins in window {begun} {sums} ({_rate(rates.miss)}) "
                "here: clients gain by pinning just before the windows change"
            )
            yield Finding(Level.WARNING, "pin-across-windows", where, message)


def _costs(card: RateCard) -> Iterator[Finding]:
    """Prices below the card's own costs, for every kind of model that the patterns tell apart."""
    costs = [ModelPrice(pattern=p, rates={STANDARD: r}) for p, r in card.costs.items()]
    seen: set[tuple[str, str]] = set()
    for pattern in [price.pattern for price in (*card.models, *costs)]:
        model = pattern.replace("*", "\0")  # a name that only prefixes match
        price, cost = card.price_of(model), most_specific(costs, model)
        if price and cost and (price.pattern, cost.pattern) not in seen:
            seen.add((price.pattern, cost.pattern))
            for window, rates in price.rates.items():
                where = f"model {pattern!r}, window {window}"
                yield from _below(where, rates, cost.rates[STANDARD])


def _below(where: str, rates: Rates, cost: Rates) -> Iterator[Finding]:
    for name in (*HIT_CLASSES, "miss", "output", "cache_write", "storage"):
        asked, paid = getattr(rates, name), getattr(cost, name)
        if asked is not None and paid is not None and asked < paid:
            yield Finding(
                Level.ERROR,
                "below-cost",
                where,
                f"{name} is sold at {_rate(asked)} and costs {_rate(paid)}",
            )


def _minimum(card: RateCard) -> Iterator[Finding]:
    if card.minimum_cached_tokens > MOST_MINIMUM:
        yield Finding(
            Level.WARNING,
            "large-minimum",
            "card",
            f"hits of fewer than {card.minimum_cached_tokens:,} tokens cost as much as misses: "
            "clients gain by padding their prompts",
        )


def _patterns(card: RateCard) -> Iterator[Finding]:
    if not any(price.pattern == "*" for price in card.models):
        yield Finding(
            Level.WARNING,
            "no-default",
            "models",
            'no [[model]] matches "*": requests for other models are refused',
        )


def _windows(card: RateCard) -> Iterator[Finding]:
    """Windows that overlap: the first listed wins, which a reader of the card may not see."""
    monday = date(2024, 1, 1)
    week = [monday + timedelta(days=number) for number in range(8)]
    around = {day + timedelta(days=off) for day in card.holidays for off in (-1, 0, 1)}
    for index, first in enumerate(card.windows):
        for second in card.windows[index + 1 :]:
            when = ""
            if _overlap(first, second, week, frozenset()):
                when = "they are open at the same time"
            elif _overlap(first, second, around, card.holidays):
                when = "they are open at the same time on a holiday"
            if when:
                yield Finding(
                    Level.ERROR,
                    "windows-overlap",
                    f"windows {first.name!r} and {second.name!r}",
                    f"{when}; a request would have two prices",
                )


def _overlap(first: Window, second: Window, days: Iterable[date], off: frozenset[date]) -> bool:
    return any(
        a[0] < b[1] and b[0] < a[1]
        for day in days
        for a in first.spans(day, off)
        for b in second.spans(day, off)
    )


def _rate(per_token: int) -> str:
    return rate_per_million(per_token)
