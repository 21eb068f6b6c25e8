"""Reads rate cards from TOML. Every number becomes an exact decimal; every unknown name is
refused.
"""

import difflib
import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn
from zoneinfo import ZoneInfo

from billing.errors import InvalidAmount, InvalidName, PriceError
from billing.money import UNITS, check_currency, parse_not_negative, units_per_token
from billing.names import check_name
from billing.prices.book import (
    ABOVE,
    DAYS,
    NS,
    STANDARD,
    Holidays,
    ModelPrice,
    PriceGroup,
    RateCard,
    Rates,
    Window,
)
from billing.prices.time_zones import find_zone
from billing.usage import HIT_CLASSES, RATE_OF

DEFAULT_CARD = "deepseek-launch"

_CARD_FIELDS = {
    *("name", "version", "valid_from", "currency", "time_zone", "holidays"),
    *("minimum_cached_tokens", "note", "tenants", "valid_until"),
}
_PER_REQUEST = {"request", "minimum"}  # amounts, not rates per million tokens
_RATE_FIELDS = {"hit", *RATE_OF.values(), *_PER_REQUEST}
REFUSED = "refused"  # for `unreported`: the answer is not sold
_MOST_FEE = 10**6
_REMOVED = dict.fromkeys(  # fields and shipped cards
    ("included", "monthly_minimum", "monthly-plan"),
    "plans and minimums are your billing system's, which `cachesvc usage export` feeds",
)
_MOST_FACTOR = 1000
_WINDOW_FIELDS = {"name", "start", "end", "days", "holidays"}
_INSTANTS_NS = range(-(2**63), 2**63)  # what the ledger can store
_MOST_RATE = 10**9  # per million tokens, so that a day's charges fit the rollups
_HEADER = re.compile(r"\s*(\[{1,2})([^\[\]]+)\]")
_FIELD = re.compile(r"""\s*["']?([^"'=\s]+)["']?\s*=""")


def load_card(path: Path) -> RateCard:
    """The card in a file. Raises `PriceError` naming the file and the field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PriceError(f"cannot read rate card {path}: {error}") from error
    return parse_card(text, str(path))


def applied_card(row: Mapping[Any, Any]) -> RateCard:
    """The card in a row of the ledger, with the instant at which it was applied."""
    card = parse_card(row["text"], was_applied=True)
    return replace(card, applied_ns=row["applied_ns"])


def shipped_cards() -> dict[str, str]:
    """The TOML of the cards in the package, by file stem."""
    folder = resources.files("billing") / "rate_cards"
    files = (entry for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {entry.name[:-5]: entry.read_text(encoding="utf-8") for entry in files}


def default_card() -> RateCard:
    """The price list of DeepSeek's context caching launch, in force where none was applied."""
    return parse_card(shipped_cards()[DEFAULT_CARD], DEFAULT_CARD)


def find_card(name_or_path: str) -> RateCard:
    """A shipped card by name, or the card in a file."""
    shipped = shipped_cards()
    if name_or_path in shipped:
        return parse_card(shipped[name_or_path], name_or_path)
    if not Path(name_or_path).exists():
        refuse_removed(name_or_path)
        names = ", ".join(sorted(shipped))
        raise PriceError(f"{name_or_path!r} is neither a file nor a shipped rate card ({names})")
    return load_card(Path(name_or_path))


def refuse_removed(name: str) -> None:
    """Raises `PriceError` if this card shipped once."""
    if name in _REMOVED:
        raise PriceError(f"rate card {name} was removed: {_REMOVED[name]}")


def card_digest(card: RateCard) -> str:
    """SHA-256 of the card's text."""
    return hashlib.sha256(card.text.encode()).hexdigest()


def parse_card(text: str, origin: str = "rate card", *, was_applied: bool = False) -> RateCard:
    """A card from TOML text. Raises `PriceError`, naming `origin` and the line.

    An applied card is not refused because clocks have come to be set differently.
    """
    try:
        data = tomllib.loads(text, parse_float=Decimal)
    except ValueError as error:  # invalid syntax, or a number with thousands of digits
        raise PriceError(f"{origin}: not TOML: {error}") from error
    return _Reader(origin, _field_lines(text), was_applied).card(data, text)


def _field_lines(text: str) -> dict[str, int]:
    """The line of each field by its path, such as `card.currency` or `model.0.off_peak.miss`."""
    lines: dict[str, int] = {}
    seen: Counter[str] = Counter()
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            root, _, rest = header[2].replace(" ", "").partition(".")
            seen[root] += header[1] == "[["
            within = [str(seen[root] - 1)] if seen[root] else []
            table = ".".join([root, *within, *([rest] if rest else [])])
            lines.setdefault(table, number)
        elif field := _FIELD.match(line):
            lines.setdefault(f"{table}.{field[1]}".removeprefix("."), number)
    return lines


class _Reader:
    """Turns tables into values. Errors begin with `origin` and the line of the path `at`."""

    def __init__(self, origin: str, lines: Mapping[str, int], was_applied: bool) -> None:
        self.origin = origin
        self.lines = lines
        self.was_applied = was_applied

    def fail(self, message: str, at: str = "") -> NoReturn:
        line = self.lines.get(at) or self.lines.get(at.rpartition(".")[0])
        raise PriceError(f"{self.origin}{f', line {line}' if line else ''}: {message}")

    @contextmanager
    def reading(self, at: str, message: str = "") -> Iterator[None]:
        """Fails with `message`, or the error's own, if what is read is not what it should be."""
        try:
            yield
        except (ArithmeticError, TypeError, ValueError, InvalidAmount, InvalidName) as error:
            self.fail(message or str(error), at)

    def distinct(self, names: Iterable[str], what: str) -> None:
        if any(count > 1 for count in Counter(names).values()):
            self.fail(f"two {what}")

    def known(self, table: Mapping[str, Any], names: Collection[str], at: str) -> None:
        for name in table:
            if name in _REMOVED and name not in names:
                self.fail(f"{name} was removed: {_REMOVED[name]}", f"{at}.{name}".removeprefix("."))
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                self.fail(f"unknown field {name!r}{hint}", f"{at}.{name}".removeprefix("."))

    def text(self, table: Mapping[str, Any], name: str, at: str) -> str:
        value = table.get(name)
        if not isinstance(value, str) or not value.strip():
            self.fail(f"[{at.partition('.')[0]}] needs {name!r}, a text", f"{at}.{name}")
        if not value.isprintable():
            self.fail(f"{name} = {value!r} has characters that do not print", f"{at}.{name}")
        return value

    def card(self, data: dict[str, Any], text: str) -> RateCard:
        self.known(data, {"card", "window", "model", "cost", "group", "service"}, "")
        head = data.get("card")
        if not isinstance(head, dict):
            self.fail("a [card] table is needed, with name, version, valid_from and currency")
        self.known(head, _CARD_FIELDS, "card")
        zone = self.zone(head.get("time_zone", "UTC"))
        windows = tuple(self.window(table, at) for at, table in self.tables(data, "window"))
        names = [window.name for window in windows]
        self.distinct(names, "[[window]] tables have the same name")
        models = tuple(self.model(table, names, at) for at, table in self.tables(data, "model"))
        if not models:
            self.fail('at least one [[model]] is needed, for example match = "*"')
        self.distinct((each.pattern for each in models), "[[model]] tables have the same match")
        costs = tuple(self.cost(table, at) for at, table in self.tables(data, "cost"))
        self.distinct((each.pattern for each in costs), "[[cost]] tables have the same match")
        groups = tuple(self.group(table, at, zone) for at, table in self.tables(data, "group"))
        services = dict(self.service(table, at) for at, table in self.tables(data, "service"))
        self.check_names(windows, groups, services)
        card = RateCard(
            name=self.text(head, "name", "card"),
            version=self.text(head, "version", "card"),
            currency=self.currency(head),
            valid_from_ns=self.instant(head.get("valid_from"), zone),
            models=models,
            windows=windows,
            zone=zone,
            holidays=self.days_off(head.get("holidays", [])),
            minimum_cached_tokens=self.count(head.get("minimum_cached_tokens", 0)),
            costs=costs,
            tenants=self.names(head.get("tenants", []), "card.tenants"),
            valid_until_ns=self.until(head, "valid_until", "card", zone),
            groups=groups,
            services=services,
            text=text,
        )
        if card.valid_until_ns is not None and card.valid_until_ns <= card.valid_from_ns:
            self.fail("valid_until is not after valid_from", "card.valid_until")
        self.check_factors(card)
        return card

    def names(self, values: object, at: str) -> frozenset[str]:
        if not isinstance(values, list):
            self.fail(f"{at.rpartition('.')[2]} is a list of tenants' names", at)
        with self.reading(at):
            return frozenset(check_name(str(value), "tenant") for value in values)

    def until(self, table: dict[str, Any], name: str, at: str, zone: ZoneInfo) -> int | None:
        if name not in table:
            return None
        return self.instant(table[name], zone, f"{at}.{name}")

    def factor(self, table: dict[str, Any], at: str) -> Fraction:
        value = table.get("factor")
        with self.reading(f"{at}.factor", f'factor = {value!r} is not a decimal such as "0.9"'):
            factor = Fraction(Decimal(str(value)))
        if isinstance(value, bool) or not 0 <= factor <= _MOST_FACTOR:
            self.fail(f"factor = {value!r}: from 0 to {_MOST_FACTOR:,}", f"{at}.factor")
        return factor

    def group(self, table: dict[str, Any], at: str, zone: ZoneInfo) -> PriceGroup:
        self.known(table, {"name", "tenants", "factor", "until"}, at)
        return PriceGroup(
            name=self.text(table, "name", at),
            tenants=self.names(table.get("tenants"), f"{at}.tenants"),
            factor=self.factor(table, at),
            until_ns=self.until(table, "until", at, zone),
        )

    def service(self, table: dict[str, Any], at: str) -> tuple[str, Fraction]:
        self.known(table, {"name", "factor"}, at)
        return self.text(table, "name", at), self.factor(table, at)

    def check_names(
        self,
        windows: tuple[Window, ...],
        groups: tuple[PriceGroup, ...],
        services: Mapping[str, Any],
    ) -> None:
        """Raises if a name is used for two terms of a price."""
        names = [*(w.name for w in windows), *(g.name for g in groups), *services]
        for name in names:
            if "|" in name or name.startswith(ABOVE):
                self.fail(f"{name!r} cannot be a name: it has another meaning in a price's terms")
        self.distinct(names, "windows, groups or service tiers have the same name")
        members = Counter(tenant for group in groups for tenant in group.tenants)
        for tenant, count in members.items():
            if count > 1:
                self.fail(f"tenant {tenant!r} is in {count} groups; one factor applies")

    def check_factors(self, card: RateCard) -> None:
        """Raises if a factor makes a price that is not a whole number of units."""
        of_groups = [Fraction(1), *(group.factor for group in card.groups)]
        of_services = [Fraction(1), *card.services.values()]
        factors = [group * service for group in of_groups for service in of_services]
        for price in card.models:
            for where, rates in (*price.rates.items(), *price.above.items()):
                for factor in factors:
                    try:
                        rates.times(factor)
                    except ValueError as error:
                        self.fail(
                            f"{error} of model {price.pattern!r} ({where}) times {factor} has "
                            "more than six decimal places per million"
                        )

    def tables(
        self, data: Mapping[str, Any], name: str, at: str = ""
    ) -> list[tuple[str, dict[str, Any]]]:
        """The tables of a name, each with its path."""
        tables = data.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self.fail(f"write [[{name}]] with two brackets: there can be several", at or name)
        return [(f"{name}.{number}", table) for number, table in enumerate(tables)]

    def currency(self, head: dict[str, Any]) -> str:
        with self.reading("card.currency"):
            return check_currency(self.text(head, "currency", "card"))

    def zone(self, name: object) -> ZoneInfo:
        message = f"time_zone {name!r} is not known; write one such as Asia/Shanghai"
        with self.reading("card.time_zone", message):
            return find_zone(str(name))

    def instant(self, value: object, zone: ZoneInfo, at: str = "card.valid_from") -> int:
        name = at.rpartition(".")[2]
        if isinstance(value, str):
            with self.reading(at, f"{name} {value!r} is not a date and time"):
                value = datetime.fromisoformat(value)
        if not isinstance(value, datetime):
            self.fail(f"{name} needs a date and time such as 2024-08-02T00:00:00+08:00", at)
        moment = value if value.tzinfo else value.replace(tzinfo=zone)
        span = moment - datetime(1970, 1, 1, tzinfo=UTC)
        instant_ns = (span.days * 86_400 + span.seconds) * NS + span.microseconds * 1000
        if instant_ns not in _INSTANTS_NS:
            self.fail(f"{name} {value} is not between the years 1678 and 2262", at)
        back = moment.astimezone(UTC).astimezone(moment.tzinfo)
        if not self.was_applied and back.replace(tzinfo=None) != moment.replace(tzinfo=None):
            self.fail(
                f"{name} {value} does not exist in {zone.key}, where clocks are set forward then; "
                "write another time, or one with an offset such as +01:00",
                at,
            )
        return instant_ns

    def days_off(self, values: object) -> frozenset[date]:
        message = "holidays is a list of dates such as 2025-01-01"
        if not isinstance(values, list):
            self.fail(message, "card.holidays")
        with self.reading("card.holidays", message):
            return frozenset(
                each if type(each) is date else date.fromisoformat(each) for each in values
            )

    def count(self, value: object) -> int:
        if type(value) is not int or value < 0:
            self.fail(
                f"minimum_cached_tokens is {value!r}; a whole number, zero or more",
                "card.minimum_cached_tokens",
            )
        return value

    def window(self, table: dict[str, Any], at: str) -> Window:
        self.known(table, _WINDOW_FIELDS, at)
        name = self.text(table, "name", at)
        if name in {STANDARD, "match", *_RATE_FIELDS}:
            self.fail(f"a window cannot be named {name!r}, which means something else", at)
        start, end = self.clock(table, "start", at), self.clock(table, "end", at)
        if start == end:
            self.fail(f"window {name!r} starts and ends at the same time; leave it out", at)
        days = table.get("days", list(DAYS))
        if not isinstance(days, list) or not days or not all(day in DAYS for day in days):
            self.fail(f"days of window {name!r} is a list of {', '.join(DAYS)}", f"{at}.days")
        message = f"holidays of window {name!r} is one of {', '.join(Holidays)}"
        with self.reading(f"{at}.holidays", message):
            holidays = Holidays(table.get("holidays", Holidays.AS_USUAL))
        numbers = frozenset(DAYS.index(day) for day in days)
        return Window(name=name, start=start, end=end, days=numbers, holidays=holidays)

    def clock(self, table: dict[str, Any], name: str, at: str) -> time:
        value = table.get(name)
        message = f"[window] needs {name!r}, a time from 00:00 to 23:59"
        with self.reading(f"{at}.{name}", message):
            clock = value if isinstance(value, time) else time.fromisoformat(str(value))
        if clock.tzinfo is not None:
            self.fail(f"{name} = {value!r}: times are in the card's time_zone", f"{at}.{name}")
        return clock

    def pattern(self, table: dict[str, Any], at: str) -> str:
        pattern = self.text(table, "match", at)
        if "*" in pattern[:-1]:
            self.fail(f"match {pattern!r}: a * stands only at the end", f"{at}.match")
        return pattern

    def cost(self, table: dict[str, Any], at: str) -> ModelPrice:
        paid = {name: value for name, value in table.items() if name != "match"}
        return ModelPrice(pattern=self.pattern(table, at), rates={STANDARD: self.rates(paid, at)})

    def model(self, table: dict[str, Any], windows: list[str], at: str) -> ModelPrice:
        pattern = self.pattern(table, at)
        self.known(table, {"match", "above", *_RATE_FIELDS, *windows}, at)
        standard = {name: table[name] for name in _RATE_FIELDS if name in table}
        rates = {STANDARD: self.rates(standard, at)}
        for name in windows:
            changes = table.get(name, {})
            if not isinstance(changes, dict):
                self.fail(f"window {name!r} of model {pattern!r} is a table of rates", at)
            rates[name] = self.rates(_changed(standard, changes), f"{at}.{name}")
        above = self.above(table.get("above", []), standard, at)
        if above and any(name in table for name in windows):
            self.fail(f"model {pattern!r} is priced by windows or by length, not by both", at)
        return ModelPrice(pattern=pattern, rates=rates, above=above)

    def above(self, tables: object, standard: dict[str, Any], at: str) -> dict[int, Rates]:
        """Rates of longer prompts; missing rates are those of short prompts."""
        found: dict[int, Rates] = {}
        for _, table in self.tables({"model.above": tables}, "model.above", at):
            changes = {k: v for k, v in table.items() if k != "prompt_tokens"}
            length = table.get("prompt_tokens")
            if type(length) is not int or length <= 0 or length in found:
                self.fail(f"prompt_tokens = {length!r}: a whole number, and each once", at)
            found[length] = self.rates(_changed(standard, changes), at)
        return found

    def rates(self, table: dict[str, Any], at: str) -> Rates:
        self.known(table, _RATE_FIELDS, at)
        priced = {name: self.rate(name, value, f"{at}.{name}") for name, value in table.items()}
        hit = priced.pop("hit", None)
        for name in HIT_CLASSES:
            if name not in priced and hit is None:
                self.fail(f"a price for 'hit', or for each tier, is needed ({name!r} has none)", at)
            priced.setdefault(name, hit or 0)
        if "explicit_hit" in priced:
            if hit is None or any(name in table for name in HIT_CLASSES):
                self.fail("explicit_hit needs one price of other hits, 'hit', for all tiers", at)
            priced["explicit_hit"] -= hit
        if "storage" in priced and "storage_minute" in priced:
            self.fail("storage is sold by the hour or by the minute ('storage_minute')", at)
        priced.setdefault("explicit_write", priced.get("cache_write", 0))
        priced.setdefault("cache_write_1h", priced["explicit_write"])
        for name in ("miss", "output"):
            if name not in priced:
                self.fail(f"a price for {name!r} is needed", at)
        if table.get("unreported") == REFUSED:
            return replace(Rates(**priced), unreported=None)
        priced["unreported"] = priced.get("unreported", priced["miss"]) - priced["miss"]
        return Rates(**priced)

    def fee(self, name: str, value: object, at: str) -> int:
        with self.reading(at, f"{name} = {value!r} is not an amount"):
            units = parse_not_negative(str(value))
        if units > _MOST_FEE * UNITS:
            self.fail(f"{name} = {value}: an amount is from zero to {_MOST_FEE:,}", at)
        return units

    def rate(self, name: str, value: object, at: str) -> int:
        if name == "unreported" and value == REFUSED:
            return 0
        if name in _PER_REQUEST:
            return self.fee(name, value, at)
        if isinstance(value, bool) or not isinstance(value, int | str | Decimal):
            self.fail(f"{name} = {value!r} is not a price per million tokens", at)
        with self.reading(at, f"{name} = {value!r} is not a decimal"):
            decimal = Decimal(value)
        if not decimal.is_finite() or not 0 <= decimal <= _MOST_RATE:
            self.fail(f"{name} = {value}: a price is from zero to {_MOST_RATE:,}", at)
        with self.reading(at):
            return units_per_token(decimal, name)


def _changed(standard: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Standard rates with changes. One price of hits replaces those of all tiers."""
    kept = {k: v for k, v in standard.items() if not ("hit" in changes and k in HIT_CLASSES)}
    return kept | dict(changes)
