"""Finds rate cards that can be gamed, that lose money, or that do not say what they seem to. Pure.

An error stops `prices apply`; a warning is shown. A rule compares prices within one model and
window, because that is what a request is pinned to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum

from billing.money import rate_per_million
from billing.prices import STANDARD, ModelPrice, RateCard, Rates
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


def lint(card: RateCard) -> list[Finding]:
    """All findings, errors first."""
    findings = [*_patterns(card), *_windows(card)]
    for price in card.models:
        for window, rates in price.rates.items():
            where = f"model {price.pattern!r}, window {window}"
            findings += _rates(where, rates, card)
            findings += _costs(where, price, rates, card)
    return sorted(findings, key=lambda finding: finding.level != Level.ERROR)


def _rates(where: str, rates: Rates, card: RateCard) -> Iterator[Finding]:
    hits = {name: getattr(rates, name) for name in HIT_CLASSES}
    for name, price in hits.items():
        if price > rates.miss:
            yield Finding(
                Level.ERROR,
                "hit-above-miss",
                where,
                f"{name} costs {_rate(price)} and a miss {_rate(rates.miss)}: clients would avoid "
                "the cache",
            )
    cheapest = min(hits.values())
    if rates.storage is not None and rates.storage + cheapest < rates.miss:
        yield Finding(
            Level.ERROR,
            "pin-below-miss",
            where,
            f"an hour of storage ({_rate(rates.storage)}) and a hit ({_rate(cheapest)}) cost less "
            f"than one miss ({_rate(rates.miss)}): pinning everything would pay",
        )
    if cheapest == 0 and rates.miss:
        yield Finding(
            Level.WARNING, "free-hits", where, "hits are free: only rate limits bound them"
        )
    if rates.miss == 0 and rates.output == 0:
        yield Finding(Level.WARNING, "free", where, "computed tokens and output are free")
    if hits["hit_disk"] < hits["hit_device"]:
        yield Finding(
            Level.WARNING,
            "cold-below-hot",
            where,
            "a disk hit costs less than a device hit: clients gain by letting blocks cool",
        )
    if rates.cache_write and rates.miss + rates.cache_write + cheapest > 2 * rates.miss:
        yield Finding(
            Level.WARNING,
            "write-never-pays",
            where,
            "with its write price, a prefix used twice costs more cached than not",
        )


def _costs(where: str, price: ModelPrice, rates: Rates, card: RateCard) -> Iterator[Finding]:
    matching = [ModelPrice(pattern=p, rates={STANDARD: r}) for p, r in card.costs.items()]
    fits = [cost for cost in matching if cost.matches(price.pattern.rstrip("*"))]
    if not fits:
        return
    cost = max(fits, key=lambda found: found.weight).rates[STANDARD]
    for name in (*HIT_CLASSES, "miss", "output", "cache_write", "storage"):
        asked, paid = getattr(rates, name), getattr(cost, name)
        if asked is not None and paid is not None and asked < paid:
            yield Finding(
                Level.ERROR,
                "below-cost",
                where,
                f"{name} is sold at {_rate(asked)} and costs {_rate(paid)}",
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
    for index, first in enumerate(card.windows):
        for second in card.windows[index + 1 :]:
            spans = [
                (a, b)
                for day in range(8)
                for a in first.spans(monday + timedelta(days=day), frozenset())
                for b in second.spans(monday + timedelta(days=day), frozenset())
            ]
            if any(a[0] < b[1] and b[0] < a[1] for a, b in spans):
                yield Finding(
                    Level.ERROR,
                    "windows-overlap",
                    f"windows {first.name!r} and {second.name!r}",
                    "they are open at the same time; a request would have two prices",
                )


def _rate(per_token: int) -> str:
    return rate_per_million(per_token)
