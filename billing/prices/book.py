"""Rate cards and the price book: a model's price at an instant. Pure values, any thread.

A card is read by `billing.prices.cards`, kept forever once applied, and found by name and version.
A request carries a `PinnedRate` from its admission to its entry. So the price of a running request
does not change, and any entry can be rated again from its reference alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple
from zoneinfo import ZoneInfo

from billing.errors import CardConflict, NoPrice
from billing.usage import RATE_OF

NS = 10**9
_STEP_NS = 1800 * NS  # clocks change at full or half hours of UTC
STANDARD = "standard"  # the window outside all named windows
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Units per token of each usage class; storage per token and started hour or minute, None if
    not sold.

    `explicit_hit` is the surcharge of an explicit hit, usually negative, and `unreported` that of a
    miss which is unreported, None if such an answer is not sold. `request` is the fee per
    request, and `minimum` the minimum price of a request.
    """

    hit_device: int
    hit_host: int
    hit_disk: int
    hit_remote: int
    miss: int
    output: int
    cache_write: int = 0
    cache_write_1h: int = 0
    storage: int | None = None
    storage_minute: int | None = None
    explicit_hit: int = 0
    explicit_write: int = 0
    unreported: int | None = 0
    request: int = 0
    minimum: int = 0

    def times(self, factor: Fraction) -> "Rates":
        """Every rate times `factor`. Raises `ValueError` if one would not be whole."""
        scaled: dict[str, int | None] = {}
        for name in RATE_NAMES:
            units = getattr(self, name)
            product = None if units is None else units * factor
            if product is not None and product.denominator != 1:
                raise ValueError(name)
            scaled[name] = None if product is None else int(product)
        return Rates(**scaled)  # type: ignore[arg-type]

    def of(self, usage_class: str) -> int:
        """The price of one token of a class, or the fee of a request."""
        found: int | None = getattr(self, RATE_OF.get(usage_class, usage_class))
        return found or 0


RATE_NAMES = tuple(field.name for field in fields(Rates))


class Holidays(StrEnum):
    """How a window treats the card's holidays."""

    AS_USUAL = "as_usual"
    CLOSED = "closed"
    ALL_DAY = "all_day"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A time of day with its own rates. With `start > end` it crosses midnight and counts for its
    first day.
    """

    name: str
    start: time
    end: time
    days: frozenset[int] = frozenset(range(7))
    holidays: Holidays = Holidays.AS_USUAL

    def covers(self, local: datetime, holidays: frozenset[date]) -> bool:
        """Whether the window is open at this wall-clock time."""
        return any(
            begin <= local.replace(tzinfo=None) < end
            for begin, end in self.spans(local.date(), holidays)
        )

    def spans(self, day: date, holidays: frozenset[date]) -> Iterable[tuple[datetime, datetime]]:
        """The naive local time spans that open on `day` or the day before."""
        for opened in (day - timedelta(days=1), day):
            is_holiday = opened in holidays
            if is_holiday and self.holidays is Holidays.CLOSED:
                continue
            if is_holiday and self.holidays is Holidays.ALL_DAY:
                begin = datetime.combine(opened, time())
                yield begin, begin + timedelta(days=1)
            elif opened.weekday() in self.days:
                begin = datetime.combine(opened, self.start)
                end = datetime.combine(opened, self.end)
                yield begin, end if end > begin else end + timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrice:
    """Rates of the models that match a pattern: a name, a prefix with a final `*`, or `*`."""

    pattern: str
    rates: Mapping[str, Rates]  # by window name; always has `standard`
    above: Mapping[int, Rates] = field(default_factory=dict)  # by prompt length, for longer prompts

    def matches(self, model: str) -> bool:
        return fits(self.pattern, model)

    @property
    def weight(self) -> tuple[bool, int]:
        """Specificity: an exact name is above all prefixes, and a longer prefix above a shorter."""
        return not self.pattern.endswith("*"), len(self.pattern)


def most_specific(prices: Iterable[ModelPrice], model: str) -> ModelPrice | None:
    """The price with the most specific pattern that matches `model`."""
    matching = [price for price in prices if price.matches(model)]
    return max(matching, key=lambda price: price.weight, default=None)


def fits(pattern: str, model: str) -> bool:
    """Whether a pattern, a name or a prefix with a final `*`, matches this model."""
    return model.startswith(pattern[:-1]) if pattern.endswith("*") else model == pattern


class RateRef(NamedTuple):
    """An entry's reference to its price, enough to find the same rates again.

    `window` names the window or the prompt length exceeded, then the group and the service tier
    whose factors apply: `off_peak`, `above 200000`, `standard | partners | flex`.
    """

    card: str
    version: str
    model: str
    window: str

    @property
    def terms(self) -> tuple[str, ...]:
        """The names that `window` consists of."""
        return tuple(self.window.split(AND))


ABOVE = "above "
AND = " | "  # between the terms of a price


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceGroup:
    """Tenants whose rates are multiplied by a factor, optionally until an instant."""

    name: str
    tenants: frozenset[str]
    factor: Fraction
    until_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The properties of a request that determine its price, besides model and instant."""

    tenant: str = ""
    prompt_tokens: int = 0
    service: str = ""  # the requested service tier; ignored if the card lacks it


NO_TERMS = Terms()


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRate:
    """The price of one request, fixed at its admission."""

    ref: RateRef
    currency: str
    pattern: str
    rates: Rates
    minimum_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class RateCard:
    """One version of a price list. `text` is its TOML as applied."""

    name: str
    version: str
    currency: str
    valid_from_ns: int
    models: tuple[ModelPrice, ...]
    windows: tuple[Window, ...] = ()
    zone: ZoneInfo = field(default_factory=lambda: ZoneInfo("UTC"))
    holidays: frozenset[date] = frozenset()
    minimum_cached_tokens: int = 0
    costs: tuple[ModelPrice, ...] = ()  # the operator's own, as `standard` rates
    tenants: frozenset[str] = frozenset()  # tenants of the card; empty: all
    valid_until_ns: int | None = None
    groups: tuple[PriceGroup, ...] = ()
    services: Mapping[str, Fraction] = field(default_factory=dict)  # factors, by service tier
    text: str = ""
    applied_ns: int = 0  # when it was put in force; 0 if it was not

    def window_at(self, instant_ns: int) -> str:
        """The window open at this instant: the first listed that covers it."""
        local = datetime.fromtimestamp(instant_ns // NS, UTC).astimezone(self.zone)
        open_now = (w.name for w in self.windows if w.covers(local, self.holidays))
        return next(open_now, STANDARD)

    def next_window(self, instant_ns: int) -> tuple[int, str] | None:
        """The next change of window within nine days, as instant and window; None if there is
        none."""
        local = datetime.fromtimestamp(instant_ns // NS, UTC).astimezone(self.zone)
        edges = {
            int(edge.replace(tzinfo=self.zone, fold=fold).timestamp()) * NS
            for window in self.windows
            for ahead in range(9)
            for span in window.spans(local.date() + timedelta(days=ahead), self.holidays)
            for edge in span
            for fold in (0, 1)
        }
        begun_ns = instant_ns // _STEP_NS * _STEP_NS
        steps = range(begun_ns, begun_ns + 9 * 86_400 * NS, _STEP_NS)  # steps of clock changes
        now = self.window_at(instant_ns)
        for at_ns in sorted({*edges, *steps} if edges else ()):
            if at_ns > instant_ns and self.window_at(at_ns) != now:
                return at_ns, self.window_at(at_ns)
        return None

    def price_of(self, model: str) -> ModelPrice | None:
        """The most specific price that matches `model`."""
        return most_specific(self.models, model)

    def pin(self, model: str, window: str) -> PinnedRate:
        """The rate of a model in a named window. Raises `NoPrice`."""
        price = self.price_of(model)
        rates = None if price is None else self._rates(price, window)
        if price is None or rates is None:
            raise NoPrice(
                f"rate card {self.name} {self.version} has no price for model {model!r} "
                f"in window {window!r}"
            )
        return PinnedRate(
            ref=RateRef(self.name, self.version, model, window),
            currency=self.currency,
            pattern=price.pattern,
            rates=rates,
            minimum_cached_tokens=self.minimum_cached_tokens,
        )

    def _rates(self, price: ModelPrice, window: str) -> Rates | None:
        """The rates named by a `RateRef`'s `window`, or None."""
        first, *factors = window.split(AND)
        rates = price.rates.get(first)
        if first.startswith(ABOVE):
            rates = price.above.get(int(first.removeprefix(ABOVE)))
        by_name = dict(self.services) | {group.name: group.factor for group in self.groups}
        for name in factors:
            if rates is None or name not in by_name:
                return None
            rates = rates.times(by_name[name])
        return rates

    def at(self, model: str, instant_ns: int, terms: Terms = NO_TERMS) -> PinnedRate:
        """The price of a request. Raises `NoPrice`."""
        return self.pin(model, self.window_for(model, instant_ns, terms))

    def window_for(self, model: str, instant_ns: int, terms: Terms = NO_TERMS) -> str:
        """The `window` of this request's `RateRef`: window or length, then group, then service."""
        price = self.price_of(model)
        first = self.window_at(instant_ns)
        above = price.above if price else ()
        lengths = [length for length in above if terms.prompt_tokens > length]
        if lengths:
            first = f"{ABOVE}{max(lengths)}"
        groups = (
            group.name
            for group in self.groups
            if terms.tenant in group.tenants
            and (group.until_ns is None or instant_ns < group.until_ns)
        )
        names = [first, *groups]
        if terms.service in self.services:
            names.append(terms.service)
        return AND.join(names)

    def is_valid(self, instant_ns: int) -> bool:
        until_ns = self.valid_until_ns
        return self.valid_from_ns <= instant_ns and (until_ns is None or instant_ns < until_ns)


@dataclass(frozen=True)
class PriceBook:
    """All applied cards. Immutable; a new card makes a new book (`with_card`)."""

    cards: tuple[RateCard, ...] = ()

    @cached_property
    def _by_ref(self) -> dict[tuple[str, str], RateCard]:
        return {(card.name, card.version): card for card in self.cards}

    def card(self, name: str, version: str) -> RateCard:
        """The card of this name and version. Raises `NoPrice`."""
        try:
            return self._by_ref[name, version]
        except KeyError:
            raise NoPrice(f"no rate card {name} {version} was ever applied") from None

    def in_force(
        self, instant_ns: int, currency: str | None = None, tenant: str = ""
    ) -> RateCard | None:
        """The card in force at this instant, of a tenant or of everybody.

        Of the valid cards it is the one that began last.
        """
        fits = [
            card
            for card in self.cards
            if card.is_valid(instant_ns)
            and currency in (None, card.currency)
            and (tenant in card.tenants if tenant else not card.tenants)
        ]
        return max(fits, key=lambda card: card.valid_from_ns, default=None)

    def card_for(
        self, model: str, instant_ns: int, currency: str | None = None, tenant: str = ""
    ) -> RateCard | None:
        """The card for a tenant's request: the tenant's own if it has the model, else
        everybody's."""
        own = self.in_force(instant_ns, currency, tenant) if tenant else None
        if own is not None and own.price_of(model) is not None:
            return own
        return self.in_force(instant_ns, currency)

    def at(
        self,
        model: str,
        instant_ns: int,
        currency: str | None = None,
        terms: Terms = NO_TERMS,
    ) -> PinnedRate:
        """The price of `model` at an instant (nanoseconds of the epoch). Raises `NoPrice`."""
        card = self.card_for(model, instant_ns, currency, terms.tenant)
        if card is None:
            when = datetime.fromtimestamp(instant_ns // NS, UTC).isoformat()
            wanted = f" in {currency}" if currency else ""
            raise NoPrice(
                f"no rate card{wanted} is in force at {when}; apply one with "
                "`cachesvc prices apply FILE`"
            )
        return card.at(model, instant_ns, terms)

    def pinned(self, ref: RateRef) -> PinnedRate:
        """The rate of an entry, found from its reference."""
        return self.card(ref.card, ref.version).pin(ref.model, ref.window)

    def with_card(self, card: RateCard) -> "PriceBook":
        """This book with one more card, or this book itself if it has the identical card.

        Raises `CardConflict` if the card's version or instant is taken.
        """
        for other in self.cards:
            if other.text == card.text:
                return self
            if (other.name, other.version) == (card.name, card.version):
                raise CardConflict(
                    f"rate card {card.name} {card.version} was already applied with another text, "
                    "and never changes; give the new one another version"
                )
            is_rival = other.tenants & card.tenants or other.tenants == card.tenants
            same = (other.currency, other.valid_from_ns) == (card.currency, card.valid_from_ns)
            if same and is_rival:
                raise CardConflict(
                    f"rate card {other.name} {other.version} is valid from the same instant, and "
                    "no card is taken back; let the new one be valid from a millisecond later"
                )
        return PriceBook((*self.cards, card))
