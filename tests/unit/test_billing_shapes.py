"""Shapes of real price lists: the shipped examples, each with cases that were computed by hand."""

from datetime import datetime

import pytest

from billing.money import format_units
from billing.prices.book import PriceBook, RateCard, Terms
from billing.prices.cards import parse_card, shipped_cards
from billing.prices.lint import lint
from billing.prices.rating import hold_amount, rate
from billing.usage import EMPTY, Usage

NOON = "2025-07-01T12:00:00+00:00"


def card(name: str) -> RateCard:
    return parse_card(shipped_cards()[name], name)


def ns(instant: str) -> int:
    return int(datetime.fromisoformat(instant).timestamp()) * 10**9


def cost(name: str, usage: Usage, at: str = NOON, model: str = "m", **terms: object) -> str:
    pinned = card(name).at(model, ns(at), Terms(**terms))  # type: ignore[arg-type]
    return format_units(rate(usage, pinned).amount)


MILLION = 10**6


@pytest.mark.parametrize(
    ("name", "usage", "terms", "expected"),
    [
        # DeepSeek at its launch: 0.1 a million hits, 1 computed, 2 of output.
        ("deepseek-launch", Usage(hit_disk=900, miss=100, output=7), {}, "0.000204"),
        ("deepseek-launch", Usage(hit_host=63, miss=1, output=1), {}, "0.000066"),
        # A prompt of exactly 200,000 tokens is not above it; one more makes all of it dearer.
        ("long-prompts", Usage(miss=200_000), {"prompt_tokens": 200_000}, "0.24"),
        ("long-prompts", Usage(miss=200_001), {"prompt_tokens": 200_001}, "0.4800024"),
        (
            "long-prompts",
            Usage(hit_disk=200_000, miss=100_000, output=1_000),
            {"prompt_tokens": 300_000},
            "0.374",  # 0.12 + 0.24 + 0.014
        ),
        ("long-prompts", Usage(storage_token_hours=2 * MILLION), {}, "9.00"),
        # A tier multiplies every rate; a partner's discount multiplies it once more.
        ("service-tiers", Usage(miss=MILLION, output=MILLION), {}, "10.80"),
        ("service-tiers", Usage(miss=MILLION, output=MILLION), {"service": "priority"}, "18.90"),
        ("service-tiers", Usage(miss=MILLION), {"service": "flex"}, "0.60"),
        ("service-tiers", Usage(miss=MILLION), {"service": "auto"}, "1.20"),
        ("service-tiers", Usage(miss=MILLION), {"tenant": "example-partner"}, "1.08"),
        (
            "service-tiers",
            Usage(miss=MILLION, cache_write=MILLION),
            {"tenant": "example-partner", "service": "batch"},
            "0.675",  # (1.20 + 0.30) x 0.9 x 0.5
        ),
        # Written to the cache: a quarter more than a miss, or twice a miss for an hour; and a fee.
        ("write-by-ttl", Usage(miss=MILLION, cache_write=MILLION), {}, "4.0002"),
        ("write-by-ttl", Usage(miss=MILLION, cache_write_1h=MILLION), {}, "6.4002"),
        ("write-by-ttl", Usage(hit_device=MILLION), {}, "0.3202"),
        ("write-by-ttl", Usage(miss=10, output=1), {}, "0.001"),  # the least that one costs
        # The fee counts towards the minimum: 0.0008 of tokens and 0.0002 are just enough.
        ("write-by-ttl", Usage(miss=249), {}, "0.001"),
        ("write-by-ttl", Usage(miss=250), {}, "0.001"),
        ("write-by-ttl", Usage(miss=251), {}, "0.0010032"),
        ("write-by-ttl", EMPTY, {}, "0.00"),  # nothing was served
        # What is marked is written for less there too: as any write where the list knows no other.
        ("write-by-ttl", Usage(miss=MILLION, explicit_write=MILLION), {}, "4.0002"),
        # Implicit hits cost a fifth of a miss, explicit ones a tenth; to mark costs a quarter more.
        ("explicit-cache", Usage(hit_disk=MILLION), {}, "0.16"),
        ("explicit-cache", Usage(hit_disk=MILLION, explicit_hit=MILLION), {}, "0.08"),
        (
            "explicit-cache",
            Usage(hit_device=3_000, hit_disk=1_000, explicit_hit=2_500, miss=100, output=10),
            {},
            "0.000568",  # 1,500 x 0.16 + 2,500 x 0.08 + 100 x 0.80 + 10 x 4.80, a million
        ),
        ("explicit-cache", Usage(miss=MILLION, cache_write=MILLION), {}, "0.80"),
        ("explicit-cache", Usage(miss=MILLION, explicit_write=MILLION), {}, "1.00"),
        ("explicit-cache", Usage(miss=MILLION, cache_write_1h=MILLION), {}, "1.00"),
        # Below the least cached size every hit is a miss, marked or not.
        ("explicit-cache", Usage(hit_disk=255, explicit_hit=255), {}, "0.000204"),
        ("explicit-cache", Usage(storage_token_minutes=90 * MILLION), {}, "1.80"),
    ],
)
def test_a_shipped_card_charges_what_was_computed_by_hand(
    name: str, usage: Usage, terms: dict[str, object], expected: str
) -> None:
    assert expected == cost(name, usage, **terms)


@pytest.mark.parametrize(
    ("at", "model", "expected"),
    [
        ("2025-03-03T00:29:59+08:00", "deepseek-chat", "10.50"),
        ("2025-03-03T00:30:00+08:00", "deepseek-chat", "5.25"),
        ("2025-03-03T08:29:59+08:00", "reasoner-1", "5.25"),
        ("2025-03-03T08:30:00+08:00", "reasoner-1", "21.00"),
    ],
)
def test_nights_cost_what_the_window_says(at: str, model: str, expected: str) -> None:
    used = Usage(hit_disk=MILLION, miss=MILLION, output=MILLION)
    assert expected == cost("peak-off-peak", used, at, model)


def test_an_explicit_hit_is_a_line_of_its_own() -> None:
    used = Usage(hit_device=3_000, hit_disk=1_000, explicit_hit=2_500)
    lines = rate(used, card("explicit-cache").at("m", ns(NOON))).lines
    assert [("hit_device", 3_000, 160_000), ("hit_disk", 1_000, 160_000)] == [
        (line.name, line.tokens, line.per_token) for line in lines[:2]
    ]
    assert ("explicit_hit", 2_500, -80_000) == (lines[2].name, lines[2].tokens, lines[2].per_token)
    dearer = rate(used, card("explicit-cache").at("small-1", ns(NOON)))
    assert "0.000525" == format_units(dearer.amount)  # 1,500 x 0.10 + 2,500 x 0.15, a million


def test_a_fee_beside_a_minimum_is_a_line_of_its_own() -> None:
    """Tokens of 0.004 and a fee of 0.003 are 0.003 short of 0.01; 0.008 of tokens are not."""
    head = "[card]\n" + HEAD.format(name="c", begins="2025-01-01T00:00:00Z")
    rates = 'hit = 1\nmiss = 4\noutput = 20\nrequest = "0.003"\nminimum = "0.01"\n'
    priced = parse_card(f'{head}[[model]]\nmatch = "*"\n{rates}')
    assert "minimum-without-effect" not in [found.rule for found in lint(priced)]
    charged = [rate(Usage(miss=n), priced.at("m", ns(NOON))) for n in (1_000, 2_000)]
    assert ["0.01", "0.011"] == [format_units(each.amount) for each in charged]
    assert [("miss", "0.004"), ("request", "0.003"), ("minimum", "0.003")] == [
        (line.name, format_units(line.amount)) for line in charged[0].lines
    ]
    assert ["0.006", "0.003"] == [format_units(each.fees) for each in charged]
    held = hold_amount(priced.at("m", ns(NOON)), prompt_tokens=1_000, output_tokens=0)
    assert "0.01" == format_units(held)


def test_what_is_held_covers_what_is_charged() -> None:
    pinned = card("write-by-ttl").at("m", ns(NOON))
    used = Usage(miss=100, output=10, cache_write_1h=64)
    assert rate(used, pinned).amount <= hold_amount(pinned, prompt_tokens=100, output_tokens=10)
    least = hold_amount(pinned, prompt_tokens=1, output_tokens=1)
    assert format_units(least) == "0.001"


HEAD = 'name = "{name}"\nversion = "1"\nvalid_from = {begins}\ncurrency = "CNY"\n'
MODEL = '[[model]]\nmatch = "{match}"\nhit = 0.1\nmiss = {miss}\noutput = 4\n'


def made(
    name: str, miss: int, begins: str = "2025-01-01T00:00:00Z", more: str = "", match: str = "*"
) -> RateCard:
    head = HEAD.format(name=name, begins=begins)
    return parse_card(f"[card]\n{head}{more}\n{MODEL.format(match=match, miss=miss)}")


def test_a_tenants_own_card_comes_before_everybodys() -> None:
    book = PriceBook(
        (
            made("all", 3),
            made("acmes", 2, more='tenants = ["acme"]', match="big-*"),
            made(
                "trial",
                1,
                more='tenants = ["acme"]\nvalid_until = 2025-03-01T00:00:00Z',
                begins="2025-02-01T00:00:00Z",
                match="big-*",
            ),
        )
    )

    def card_of(tenant: str, model: str, at: str) -> str:
        return book.at(model, ns(at), "CNY", Terms(tenant=tenant)).ref.card

    january, february, march = (f"2025-0{month}-01T00:00:00+00:00" for month in (1, 2, 3))
    assert "all" == card_of("bolt", "big-1", february)
    assert "all" == card_of("acme", "small", february)  # its own card has no such model
    assert ["acmes", "trial", "acmes"] == [
        card_of("acme", "big-1", at) for at in (january, february, march)
    ]


GROUP = """[[group]]
name = "g"
tenants = ["acme"]
factor = "0"
until = 2025-02-01T00:00:00Z
"""


def test_a_groups_factor_ends_when_it_says() -> None:
    head = "[card]\n" + HEAD.format(name="c", begins="2025-01-01T00:00:00Z")
    priced = parse_card(head + GROUP + MODEL.format(match="*", miss=2))
    acme = Terms(tenant="acme")
    assert 0 == priced.at("m", ns("2025-01-31T23:59:59+00:00"), acme).rates.miss
    assert 2_000_000 == priced.at("m", ns("2025-02-01T00:00:00+00:00"), acme).rates.miss
    assert "standard | g" == priced.at("m", ns("2025-01-02T00:00:00+00:00"), acme).ref.window
