"""Reads rate cards from TOML. Every number becomes an exact decimal; every unknown name is
refused.
"""

import difflib
import hashlib
import tomllib
from collections.abc import Collection, Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from billing.errors import InvalidAmount, PriceError
from billing.money import check_currency, units_per_token
from billing.prices import DAYS, NS, STANDARD, Holidays, ModelPrice, RateCard, Rates, Window
from billing.usage import HIT_CLASSES

DEFAULT_CARD = "deepseek-launch"

_CARD_FIELDS = {
    *("name", "version", "valid_from", "currency", "time_zone", "holidays"),
    *("minimum_cached_tokens", "note"),
}
_RATE_FIELDS = {"hit", *HIT_CLASSES, "miss", "output", "cache_write", "storage"}
_WINDOW_FIELDS = {"name", "start", "end", "days", "holidays"}


def load_card(path: Path) -> RateCard:
    """The card in a file. Raises `PriceError` naming the file and the field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PriceError(f"cannot read rate card {path}: {error}") from error
    return parse_card(text, str(path))


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
        names = ", ".join(sorted(shipped))
        raise PriceError(f"{name_or_path!r} is neither a file nor a shipped rate card ({names})")
    return load_card(Path(name_or_path))


def card_digest(card: RateCard) -> str:
    """SHA-256 of the card's text."""
    return hashlib.sha256(card.text.encode()).hexdigest()


def parse_card(text: str, origin: str = "rate card") -> RateCard:
    """A card from TOML text. Raises `PriceError`; `origin` is named in it."""
    try:
        data = tomllib.loads(text, parse_float=Decimal)
        return _Reader(origin).card(data, text)
    except tomllib.TOMLDecodeError as error:
        raise PriceError(f"{origin}: not TOML: {error}") from error
    except InvalidAmount as error:
        raise PriceError(f"{origin}: {error}") from error


class _Reader:
    """Turns tables into values; `origin` begins every complaint."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def fail(self, message: str) -> NoReturn:
        raise PriceError(f"{self.origin}: {message}")

    def known(self, table: Mapping[str, Any], names: Collection[str], where: str) -> None:
        for name in table:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                self.fail(f"unknown field {name!r} in {where}{hint}")

    def text(self, table: Mapping[str, Any], name: str, where: str) -> str:
        value = table.get(name)
        if not isinstance(value, str) or not value.strip():
            self.fail(f"{where} needs {name!r}, a text")
        return value

    def card(self, data: dict[str, Any], text: str) -> RateCard:
        self.known(data, {"card", "window", "model", "cost"}, "the file")
        head = data.get("card")
        if not isinstance(head, dict):
            self.fail("a [card] table is needed, with name, version, valid_from and currency")
        self.known(head, _CARD_FIELDS, "[card]")
        zone = self.zone(head.get("time_zone", "UTC"))
        windows = tuple(self.window(table) for table in self.tables(data, "window"))
        names = [window.name for window in windows]
        if len(set(names)) != len(names) or STANDARD in names:
            self.fail(f"window names must differ, and {STANDARD!r} means outside all of them")
        models = tuple(self.model(table, names) for table in self.tables(data, "model"))
        if not models:
            self.fail('at least one [[model]] is needed, for example match = "*"')
        patterns = [model.pattern for model in models]
        if len(set(patterns)) != len(patterns):
            self.fail("two [[model]] tables have the same match")
        costs = self.tables(data, "cost")
        return RateCard(
            name=self.text(head, "name", "[card]"),
            version=self.text(head, "version", "[card]"),
            currency=check_currency(self.text(head, "currency", "[card]")),
            valid_from_ns=self.instant(head.get("valid_from"), zone),
            models=models,
            windows=windows,
            zone=zone,
            holidays=self.days_off(head.get("holidays", [])),
            minimum_cached_tokens=self.count(head.get("minimum_cached_tokens", 0)),
            costs={self.pattern(table): self.rates(self.priced(table)) for table in costs},
            text=text,
        )

    def tables(self, data: dict[str, Any], name: str) -> list[dict[str, Any]]:
        tables = data.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self.fail(f"write [[{name}]] with two brackets: there can be several")
        return tables

    def zone(self, name: object) -> ZoneInfo:
        try:
            return ZoneInfo(str(name))
        except (ZoneInfoNotFoundError, ValueError):
            self.fail(f"time_zone {name!r} is not known; write one such as Asia/Shanghai")

    def instant(self, value: object, zone: ZoneInfo) -> int:
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                self.fail(f"valid_from {value!r} is not a date and time")
        if not isinstance(value, datetime):
            self.fail("valid_from needs a date and time such as 2024-08-02T00:00:00+08:00")
        moment = value if value.tzinfo else value.replace(tzinfo=zone)
        seconds = moment.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
        return (seconds.days * 86_400 + seconds.seconds) * NS + seconds.microseconds * 1000

    def days_off(self, values: object) -> frozenset[date]:
        if not isinstance(values, list):
            self.fail("holidays is a list of dates")
        try:
            return frozenset(
                value if type(value) is date else date.fromisoformat(value) for value in values
            )
        except (TypeError, ValueError):
            self.fail("holidays is a list of dates such as 2025-01-01")

    def count(self, value: object) -> int:
        if type(value) is not int or value < 0:
            self.fail(f"minimum_cached_tokens is {value!r}; a whole number, zero or more")
        return value

    def window(self, table: dict[str, Any]) -> Window:
        self.known(table, _WINDOW_FIELDS, "[[window]]")
        name = self.text(table, "name", "[[window]]")
        start, end = self.clock(table, "start"), self.clock(table, "end")
        if start == end:
            self.fail(f"window {name!r} starts and ends at the same time; leave it out instead")
        days = table.get("days", list(DAYS))
        if not isinstance(days, list) or not days or not set(days) <= set(DAYS):
            self.fail(f"days of window {name!r} is a list of {', '.join(DAYS)}")
        try:
            holidays = Holidays(table.get("holidays", Holidays.AS_USUAL))
        except ValueError:
            self.fail(f"holidays of window {name!r} is one of {', '.join(Holidays)}")
        numbers = frozenset(DAYS.index(day) for day in days)
        return Window(name=name, start=start, end=end, days=numbers, holidays=holidays)

    def clock(self, table: dict[str, Any], name: str) -> time:
        value = table.get(name)
        if isinstance(value, time):
            return value
        try:
            return time.fromisoformat(str(value))
        except ValueError:
            self.fail(f"[[window]] needs {name!r}, a time such as 00:30")

    def pattern(self, table: dict[str, Any]) -> str:
        pattern = self.text(table, "match", "[[model]]")
        if "*" in pattern[:-1]:
            self.fail(f"match {pattern!r}: a * stands only at the end")
        return pattern

    def priced(self, table: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in table.items() if name != "match"}

    def model(self, table: dict[str, Any], windows: list[str]) -> ModelPrice:
        pattern = self.pattern(table)
        self.known(table, {"match", *_RATE_FIELDS, *windows}, f"[[model]] {pattern!r}")
        standard = {name: table[name] for name in _RATE_FIELDS if name in table}
        rates = {STANDARD: self.rates(standard)}
        for name in windows:
            changes = table.get(name, {})
            if not isinstance(changes, dict):
                self.fail(f"window {name!r} of model {pattern!r} is a table of rates")
            kept = {
                k: v for k, v in standard.items() if not ("hit" in changes and k in HIT_CLASSES)
            }
            rates[name] = self.rates({**kept, **changes})
        return ModelPrice(pattern=pattern, rates=rates)

    def rates(self, table: dict[str, Any]) -> Rates:
        self.known(table, _RATE_FIELDS, "the rates")
        priced = {name: self.rate(name, value) for name, value in table.items()}
        hit = priced.pop("hit", None)
        for name in HIT_CLASSES:
            if name not in priced and hit is None:
                self.fail(f"a price for 'hit', or for each tier, is needed ({name!r} has none)")
            priced.setdefault(name, hit or 0)
        for name in ("miss", "output"):
            if name not in priced:
                self.fail(f"a price for {name!r} is needed")
        return Rates(**priced)

    def rate(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str | Decimal):
            self.fail(f"{name} = {value!r} is not a price per million tokens")
        try:
            decimal = Decimal(value)
        except ArithmeticError:
            self.fail(f"{name} = {value!r} is not a decimal")
        if not decimal.is_finite() or decimal < 0:
            self.fail(f"{name} = {value!r}: a price is zero or more")
        return units_per_token(decimal, name)
