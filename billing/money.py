"""Money as whole numbers: 1 unit is 1e-12 of a currency unit. Pure; called from everywhere.

A rate is a decimal per million tokens, so the price of one token is `rate * 1e-6`, a whole number
of units when the rate has at most six decimal places (0.028 per million is 28,000 units a token).
Only rendering rounds; there are no binary fractions.
"""

import re
from decimal import ROUND_HALF_EVEN, Context, Decimal, Inexact, InvalidOperation, Overflow

from billing.errors import InvalidAmount

UNITS = 10**12  # units in one unit of the currency
PLACES = 12
TOKENS_PER_RATE = 10**6  # a rate is quoted for this many tokens

# Currencies with other than two decimal places, ISO 4217 (table A.1).
_PLACES = {
    0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
    3: "BHD IQD JOD KWD LYD OMR TND",
    4: "CLF UYW",
}

_AMOUNT = re.compile(r"[+-]?[0-9]{1,15}(\.[0-9]{1,40})?")
_CURRENCY = re.compile(r"[A-Z]{3}")
# Wide enough for any amount here. Every use is exact, or quantizes half-even on purpose.
_CONTEXT = Context(prec=80, rounding=ROUND_HALF_EVEN)
_EXACT = Context(prec=80, traps=[Inexact, InvalidOperation, Overflow])


def parse_amount(text: str) -> int:
    """Units of a decimal such as "12.50". Raises `InvalidAmount` on anything inexact."""
    cleaned = text.strip()
    if not _AMOUNT.fullmatch(cleaned):
        raise InvalidAmount(
            f"{text!r} is not an amount of money; write a decimal such as 12.50, "
            "with at most 15 digits before the point"
        )
    units = Decimal(cleaned).scaleb(PLACES, _CONTEXT)
    if units != units.to_integral_value():
        raise InvalidAmount(f"{text!r} has more than {PLACES} decimal places")
    return int(units)


def parse_units(text: str) -> int:
    """Units of a text that `format_units` wrote exactly, of any length."""
    return int(Decimal(text).scaleb(PLACES, _EXACT))


def parse_positive(text: str) -> int:
    units = parse_amount(text)
    if units <= 0:
        raise InvalidAmount(f"{text!r} is not above zero")
    return units


def parse_not_negative(text: str) -> int:
    units = parse_amount(text)
    if units < 0:
        raise InvalidAmount(f"{text!r} is below zero")
    return units


def format_units(units: int, places: int | None = None) -> str:
    """A decimal string: exact without trailing zeros (at least two places), or half-even
    rounded.
    """
    value = Decimal(units).scaleb(-PLACES, _CONTEXT)
    if places is not None:
        return f"{value.quantize(Decimal(1).scaleb(-places), context=_CONTEXT):f}"
    exact = f"{value:.{PLACES}f}"
    return exact.rstrip("0").ljust(len(exact) - PLACES + 2, "0")


def minor_places(currency: str) -> int:
    """The decimal places of payable amounts in a currency.

    This is the one rounding of statements.
    """
    return next((places for places, codes in _PLACES.items() if currency in codes.split()), 2)


def round_half_even(units: int, places: int) -> int:
    """Units of the nearest amount with `places` decimals; ties to even."""
    step: int = 10 ** (PLACES - places)
    quotient, rest = divmod(units, step)
    if 2 * rest > step or (2 * rest == step and quotient % 2):
        quotient += 1
    return quotient * step


def units_per_token(rate: Decimal, field: str) -> int:
    """Units per token at `rate` per million tokens. Raises `InvalidAmount` if not whole."""
    try:
        units = _EXACT.multiply(rate, Decimal(UNITS // TOKENS_PER_RATE))
        whole: int = int(units.to_integral_exact(context=_EXACT))
    except ArithmeticError:
        raise InvalidAmount(
            f"{field} = {rate} has more than six decimal places per million tokens"
        ) from None
    return whole


def rate_per_million(per_token: int) -> str:
    """`per_token` units as the rate per million tokens, a decimal string."""
    return format_units(per_token * TOKENS_PER_RATE)


def check_currency(code: str) -> str:
    """An ISO 4217 style code, three capitals. Raises `InvalidAmount`."""
    if not _CURRENCY.fullmatch(code):
        raise InvalidAmount(f"currency {code!r} is not three capital letters such as CNY or USD")
    return code
