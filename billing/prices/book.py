"""Rate cards and the book of them: which price a model has at an instant. Pure values, any thread.

A card is read by `billing.prices.cards`, kept forever once applied, and found again by name and
version.
A `PinnedRate` is what a request carries from its admission to its entry: the price does not change
under a running request, and any entry can be rated again from its reference alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple
from zoneinfo import ZoneInfo

from billing.errors import CardConflict, NoPrice

NS = 10**9
_STEP_NS = 1800 * NS  # clocks change at whole or half hours of UTC
STANDARD = "standard"  # the window outside all named windows
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Units per token of each usage class; storage per token and started hour, None if not sold."""

    hit_device: int
    hit_host: int
    hit_disk: int
    hit_remote: int
    miss: int
    output: int
    cache_write: int = 0
    storage: int | None = None


class Holidays(StrEnum):
    """What a window does on the card's holidays."""

    AS_USUAL = "as_usual"
    CLOSED = "closed"
    ALL_DAY = "all_day"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A time of day with its own rates. `start > end` crosses midnight and belongs to its first
    day.
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
        """The naive local spans opened on `day` or the day before it."""
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
    """Rates of the models a pattern matches: a name, a prefix with a final `*`, or `*`."""

    pattern: str
    rates: Mapping[str, Rates]  # by window name; always has `standard`

    def matches(self, model: str) -> bool:
        if self.pattern.endswith("*"):
            return model.startswith(self.pattern[:-1])
        return model == self.pattern

    @property
    def weight(self) -> tuple[bool, int]:
        """Greater is more specific: an exact name first, then the longest prefix."""
        return not self.pattern.endswith("*"), len(self.pattern)


def most_specific(prices: Iterable[ModelPrice], model: str) -> ModelPrice | None:
    """The price whose pattern says most about `model`, of those that match it."""
    matching = [price for price in prices if price.matches(model)]
    return max(matching, key=lambda price: price.weight, default=None)


class RateRef(NamedTuple):
    """What an entry stores of its price; enough to find the same rates again."""

    card: str
    version: str
    model: str
    window: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRate:
    """The price of one request, fixed when it was admitted."""

    ref: RateRef
    currency: str
    pattern: str
    rates: Rates
    minimum_cached_tokens: int = 0

    @property
    def version(self) -> str:
        return self.ref.version

    @property
    def window(self) -> str:
        return self.ref.window


@dataclass(frozen=True, kw_only=True)
class RateCard:
    """One version of a price list. `text` is its TOML, kept as it was applied."""

    name: str
    version: str
    currency: str
    valid_from_ns: int
    models: tuple[ModelPrice, ...]
    windows: tuple[Window, ...] = ()
    zone: ZoneInfo = field(default_factory=lambda: ZoneInfo("UTC"))
    holidays: frozenset[date] = frozenset()
    minimum_cached_tokens: int = 0
    costs: Mapping[str, Rates] = field(default_factory=dict)  # by pattern; what the operator pays
    text: str = ""

    def window_at(self, instant_ns: int) -> str:
        """The name of the window open at this instant; the first listed that covers it."""
        local = datetime.fromtimestamp(instant_ns // NS, UTC).astimezone(self.zone)
        open_now = (w.name for w in self.windows if w.covers(local, self.holidays))
        return next(open_now, STANDARD)

    def next_window(self, instant_ns: int) -> tuple[int, str] | None:
        """When the open window changes next and to which, within nine days; None: it does not."""
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
        steps = range(begun_ns, begun_ns + 9 * 86_400 * NS, _STEP_NS)  # where clocks are changed
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
        if price is None or window not in price.rates:
            raise NoPrice(
                f"rate card {self.name} {self.version} has no price for model {model!r} "
                f"in window {window!r}"
            )
        return PinnedRate(
            ref=RateRef(self.name, self.version, model, window),
            currency=self.currency,
            pattern=price.pattern,
            rates=price.rates[window],
            minimum_cached_tokens=self.minimum_cached_tokens,
        )

    def at(self, model: str, instant_ns: int) -> PinnedRate:
        return self.pin(model, self.window_at(instant_ns))


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

    def in_force(self, instant_ns: int, currency: str | None = None) -> RateCard | None:
        """The card valid at this instant: the latest `valid_from` that is not after it."""
        fits = [
            card
            for card in self.cards
            if card.valid_from_ns <= instant_ns and currency in (None, card.currency)
        ]
        return max(fits, key=lambda card: card.valid_from_ns, default=None)

    def at(self, model: str, instant_ns: int, currency: str | None = None) -> PinnedRate:
        """The price of `model` at an instant (nanoseconds of the epoch). Raises `NoPrice`."""
        card = self.in_force(instant_ns, currency)
        if card is None:
            when = datetime.fromtimestamp(instant_ns // NS, UTC).isoformat()
            wanted = f" in {currency}" if currency else ""
            raise NoPrice(
                f"no rate card{wanted} is in force at {when}; apply one with "
                "`cachesvc prices apply FILE`"
            )
        return card.at(model, instant_ns)

    def pinned(self, ref: RateRef) -> PinnedRate:
        """The rate an entry was charged at, found again from its reference."""
        return self.card(ref.card, ref.version).pin(ref.model, ref.window)

    def with_card(self, card: RateCard) -> "PriceBook":
        """This book and one more card; this very book when it has that card, word for word.

        Raises `CardConflict` when the card's version or instant is taken.
        """
        for other in self.cards:
            if other.text == card.text:
                return self
            if (other.name, other.version) == (card.name, card.version):
                raise CardConflict(
                    f"rate card {card.name} {card.version} was applied already, with another text, "
                    "and never changes; give the new one another version"
                )
            if (other.currency, other.valid_from_ns) == (card.currency, card.valid_from_ns):
                raise CardConflict(
                    f"rate card {other.name} {other.version} is valid from the same instant"
                )
        return PriceBook((*self.cards, card))
