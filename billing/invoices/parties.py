"""The seller and buyers of invoices: a TOML file that the operator applies, like rate cards. Pure.

[seller]
name = "Example Cloud GmbH"
address = ["Street 1", "10115 Berlin"]
tax_id = "DE123456789"
payment = "IBAN DE02 1203 0000 0000 2020 51"
payment_days = 14
time_zone = "Europe/Berlin"
taxes = [{ name = "VAT", rate = "19" }]

[[buyer]]
tenant = "acme"
name = "Acme Ltd"
address = ["1 Road", "London"]
taxes = []
note = "Reverse charge"
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any
from zoneinfo import ZoneInfo

from billing.errors import BillingError, PartiesError
from billing.names import check_name, check_text
from billing.prices.time_zones import find_zone

MOST_LINES = 8  # of an address
MOST_CHARACTERS = 200  # of a line
MOST_DAYS = 365
_SERIES = re.compile(r"[A-Z0-9][A-Z0-9-]{0,15}")
_RATE = re.compile(r"[0-9]{1,2}(\.[0-9]{1,4})?")


@dataclass(frozen=True, slots=True)
class Tax:
    """A tax on the whole net amount; `rate` is in percent, as written."""

    name: str
    rate: str

    @property
    def percent(self) -> Decimal:
        return Decimal(self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seller:
    """Who issues the invoices, and the terms of all of them."""

    name: str
    address: tuple[str, ...]
    tax_id: str = ""
    email: str = ""
    payment: str = ""  # how to pay: printed under the total
    note: str = ""
    payment_days: int = 30
    time_zone: str = "UTC"  # where months begin
    series: str = "INV-"
    credit_series: str = "CN-"
    taxes: tuple[Tax, ...] = ()

    @property
    def zone(self) -> ZoneInfo:
        return find_zone(self.time_zone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buyer:
    """A buyer. `taxes` and `payment_days` are the seller's if None."""

    tenant: str
    name: str
    address: tuple[str, ...]
    tax_id: str = ""
    reference: str = ""  # the buyer's own, such as an order number
    external_id: str = ""  # this buyer's id in Stripe or Lago
    note: str = ""
    payment_days: int | None = None
    taxes: tuple[Tax, ...] | None = None


@dataclass(frozen=True, slots=True)
class Parties:
    """The seller and the buyers, as read from their TOML `text`."""

    seller: Seller
    buyers: Mapping[str, Buyer]
    text: str

    def buyer(self, tenant: str) -> Buyer:
        """The buyer of a tenant. Raises `PartiesError` if there is none."""
        found = self.buyers.get(tenant)
        if found is None:
            raise PartiesError(
                f"tenant {tenant!r} has no address for invoices: add a [[buyer]] with "
                f"tenant = {tenant!r} to the file, and `cachesvc invoice parties FILE`"
            )
        return found

    def taxes_of(self, buyer: Buyer) -> tuple[Tax, ...]:
        return self.seller.taxes if buyer.taxes is None else buyer.taxes


def parse_parties(text: str) -> Parties:
    """The parties in a TOML text. Raises `PartiesError`, naming the field."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PartiesError(f"the file is not valid TOML: {error}") from None
    _check_keys(data, {"seller", "buyer"}, "the file")
    if not isinstance(data.get("seller"), dict):
        raise PartiesError("the file has no [seller]")
    seller = Seller(**_fields(data["seller"], Seller, "[seller]"))
    for name in ("series", "credit_series"):
        if not _SERIES.fullmatch(getattr(seller, name)):
            raise PartiesError(f"[seller] {name} is up to 16 capitals, digits and -, such as INV-")
    if seller.series == seller.credit_series:
        raise PartiesError("[seller] series and credit_series are the same; each has its numbers")
    _said_of("[seller] time_zone", find_zone, seller.time_zone)
    buyers: dict[str, Buyer] = {}
    listed = data.get("buyer", [])
    if not isinstance(listed, list):
        raise PartiesError("a buyer is written [[buyer]], with two brackets")
    for number, each in enumerate(listed, 1):
        buyer = Buyer(**_fields(each, Buyer, f"[[buyer]] {number}"))
        _said_of(f"[[buyer]] {number} tenant", check_name, buyer.tenant, "tenant")
        if buyer.tenant in buyers:
            raise PartiesError(f"tenant {buyer.tenant!r} has two [[buyer]]")
        buyers[buyer.tenant] = buyer
    return Parties(seller, buyers, text)


def _fields(data: Any, kind: type[Any], where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise PartiesError(f"{where} is not a table")
    names = set(kind.__dataclass_fields__)
    _check_keys(data, names, where)
    for name in ("tenant", "name", "address"):
        if name in names and not data.get(name):
            raise PartiesError(f"{where} has no {name}")
    return {name: _value(name, value, f"{where} {name}") for name, value in data.items()}


def _check_keys(data: Mapping[str, Any], names: set[str], where: str) -> None:
    for name in data:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PartiesError(f"{where} has no field {name!r}{hint}")


def _value(name: str, value: Any, where: str) -> Any:
    if name == "address":
        if not isinstance(value, list) or len(value) > MOST_LINES:
            raise PartiesError(f"{where} is a list of up to {MOST_LINES} lines")
        return tuple(_line(line, where) for line in value)
    if name == "taxes":
        return _taxes(value, where)
    if name == "payment_days":
        if type(value) is not int or not 0 <= value <= MOST_DAYS:
            raise PartiesError(f"{where} is a whole number from 0 to {MOST_DAYS}")
        return value
    return _line(value, where)


def _line(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MOST_CHARACTERS:
        raise PartiesError(f"{where} is one line of text, up to {MOST_CHARACTERS} characters")
    _said_of(where, check_text, value, "text")
    return value


def _taxes(value: Any, where: str) -> tuple[Tax, ...]:
    if not isinstance(value, list):
        raise PartiesError(f'{where} is a list such as [{{ name = "VAT", rate = "19" }}]')
    taxes: list[Tax] = []
    for each in value:
        if not isinstance(each, dict) or set(each) != {"name", "rate"}:
            raise PartiesError(f"{where}: each tax has a name and a rate, and nothing else")
        rate = each["rate"]
        if not isinstance(rate, str) or not _RATE.fullmatch(rate):
            raise PartiesError(
                f'{where}: a rate is a percentage in quotes, such as "19" or "8.875"; '
                f"{rate!r} is none"
            )
        taxes.append(Tax(_line(each["name"], where), rate))
    return tuple(taxes)


def _said_of(where: str, check: Callable[..., object], *values: str) -> None:
    try:
        check(*values)
    except BillingError as error:
        raise PartiesError(f"{where}: {error}") from None
