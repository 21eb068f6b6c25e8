"""Rate cards: read strictly, in force by instant and window, linted against being gamed; and the
shipped examples, each with cases that were computed by hand.
"""

from datetime import UTC, datetime

import pytest

from billing.errors import CardConflict, NoPrice, PriceError
from billing.money import format_units
from billing.prices.book import NS, PriceBook, RateCard, RateRef, Terms
from billing.prices.cards import (
    applied_card,
    card_digest,
    default_card,
    find_card,
    parse_card,
    shipped_cards,
)
from billing.prices.lint import Severity, lint
from billing.prices.rating import hold_amount, rate
from billing.usage import EMPTY, Usage
from tests.support.billing import card_text, priced

BASE = """
[card]
name = "c"
version = "{version}"
valid_from = {valid_from}
currency = "CNY"
time_zone = "{zone}"
{more}
[[model]]
match = "*"
{hit}
miss = 1
output = "2"
{rates}
"""
GROUP = '[[group]]\nname = "{0}"\ntenants = ["acme"]\nfactor = "{1}"\n'
SERVICE = '[[service]]\nname = "{0}"\n{1} = "1"\n'
TIERS = "\n".join(f"hit_{tier} = 1" for tier in ("device", "host", "disk", "remote"))
ABOVE = "[[model.above]]\nprompt_tokens = 9\nmiss = 0.5\n"


WINDOW = '[[window]]\nname = "w"\nstart = "00:30"\nend = "08:30"\n'


USUAL = {"version": "1", "valid_from": "2024-01-01T00:00:00Z", "zone": "UTC"}
USUAL |= {"more": "", "hit": "hit = 0.1", "rates": ""}


def card(**changes: str) -> RateCard:
    return parse_card(BASE.format(**USUAL | changes))


def version(number: str, valid_from: str) -> RateCard:
    return card(version=number, valid_from=valid_from)


def ns(text: str) -> int:
    return int(datetime.fromisoformat(text).astimezone(UTC).timestamp()) * NS


@pytest.mark.parametrize("name", sorted(shipped_cards()))
def test_shipped_cards_are_without_objection(name):
    assert [finding for finding in lint(find_card(name)) if finding.level is Severity.ERROR] == []


def test_bare_decimals_are_read_exactly():
    assert card().pin("m", "standard").rates.hit_disk == 100_000


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"zone": "Mars"}, "Mars"),
        ({"valid_from": '"soon"'}, "soon"),
        ({"valid_from": "="}, "not TOML"),
        ({"version": ""}, "needs 'version'"),
        ({"more": "valid_until = 2024-01-01T00:00:00Z"}, "line 8: valid_until is not after"),
        ({"more": "minimum_cached = 1"}, "did you mean 'minimum_cached_tokens'"),
        ({"rates": "hit_dsk = 1"}, "did you mean 'hit_disk'"),
        ({"rates": "storage = -1"}, "line 14: .* from zero"),
        ({"rates": "storage = nan"}, "from zero"),
        ({"rates": "storage = 1e1000000"}, "from zero to 1,000,000,000"),
        ({"rates": "storage = 1000000000.1"}, "from zero to 1,000,000,000"),
        ({"rates": "storage = " + "9" * 5000}, "not TOML"),
        ({"rates": "storage = 0.0000001"}, "six decimal places"),
        ({"rates": "storage = 0.1" + "0" * 99 + "1"}, "six decimal places"),
        ({"rates": "storage = true"}, "not a price"),
        ({"rates": "[[cost]]\nmatch='*'\nhit=0\nmiss=0\noutput=0\nfoo=1"}, "line 19: .*'foo'"),
        ({"rates": "\n".join(2 * ["[[cost]]\nmatch='*'\nhit=0\nmiss=0\noutput=0"])}, "same match"),
        ({"valid_from": "9999-01-01T00:00:00Z"}, "line 5: .*between the years 1678 and 2262"),
        ({"valid_from": "0001-01-01T00:00:00", "zone": "Asia/Shanghai"}, "between the years"),
        ({"zone": "Europe"}, "line 7: .*'Europe'"),
        ({"zone": "a" * 5000}, "not known"),
        ({"version": "1\\n2"}, "do not print"),
        ({"more": WINDOW + 'days = [["mon"]]'}, "line 12: days"),
        ({"more": WINDOW.replace("00:30", "00:30+08:00")}, "in the card's time_zone"),
        ({"more": WINDOW.replace("08:30", "24:00")}, "from 00:00 to 23:59"),
        ({"more": WINDOW.replace('"w"', '"miss"')}, "cannot be named 'miss'"),
        ({"more": WINDOW, "rates": "[model.w]\nmis = 3"}, "line 19: .*did you mean 'miss'"),
        ({"hit": TIERS, "rates": "explicit_hit = 1"}, "one price of other hits, 'hit'"),
        ({"rates": "hit_disk = 2\nexplicit_hit = 1"}, "'hit', for all tiers"),
        ({"rates": "storage = 9\nstorage_minute = 1"}, "by the hour or by the minute"),
        ({"rates": '[[included]]\nname = "i"'}, "included was removed: plans and minimums are"),
        ({"rates": 2 * ABOVE}, "each once"),
        ({"rates": "request = 1000001"}, "from zero to 1,000,000"),
        ({"more": GROUP.format("g", "0.0000001")}, "more than six decimal places"),
        ({"more": GROUP.format("g", "-1")}, "from 0 to 1,000"),
        ({"more": GROUP.format("g", "half")}, "is not a decimal"),
        ({"more": GROUP.format("g", 1) + GROUP.format("h", 1)}, "in 2 groups"),
        ({"more": SERVICE.format("a | b", "factor")}, "cannot be a name"),
        ({"more": SERVICE.format("g", "factor") + GROUP.format("g", 1)}, "same name"),
        ({"more": SERVICE.format("g", "factr")}, "did you mean 'factor'"),
    ],
)
def test_a_card_that_cannot_be_read_names_the_field(changes, complaint):
    with pytest.raises(PriceError, match=complaint):
        card(**changes)


def test_a_card_that_is_nowhere_names_the_shipped_ones():
    with pytest.raises(PriceError, match="deepseek-launch"):
        find_card("nowhere.toml")
    with pytest.raises(PriceError, match="monthly-plan was removed: plans and minimums"):
        find_card("monthly-plan")


def test_a_model_without_a_price_is_refused():
    only = parse_card(card().text.replace('"*"', '"a*"'))
    with pytest.raises(NoPrice, match="'b'"):
        only.at("b", ns("2025-01-01T00:00:00+00:00"))


def test_the_latest_card_that_has_begun_is_in_force():
    book = PriceBook((version("2", "2025-01-01T00:00:00Z"), card()))
    assert book.at("m", ns("2024-12-31T23:59:59+00:00")).ref.version == "1"
    assert book.at("m", ns("2025-01-01T00:00:00+00:00")).ref.version == "2"
    with pytest.raises(NoPrice, match="in force at 2023"):
        book.at("m", ns("2023-01-01T00:00:00+00:00"))
    with pytest.raises(NoPrice, match="in USD"):
        book.at("m", ns("2025-01-01T00:00:00+00:00"), "USD")
    assert book.pinned(RateRef("c", "1", "m", "standard")).ref.version == "1"


def test_an_applied_version_and_its_instant_are_taken():
    book = PriceBook((card(),))
    with pytest.raises(CardConflict, match="another version"):
        book.with_card(version("1", "2026-01-01T00:00:00Z"))
    with pytest.raises(CardConflict, match=r"same instant, .* a millisecond later"):
        book.with_card(card(version="2"))
    corrected = book.with_card(version("2", "2024-01-01T00:00:00.001Z"))
    assert corrected.at("m", ns("2024-01-01T00:00:01+00:00")).ref.version == "2"
    assert book.with_card(card()) is book
    assert len(book.with_card(version("2", "2026-01-01T00:00:00Z")).cards) == 2


NIGHT = '[[window]]\nname = "night"\nstart = "22:00"\nend = "06:00"\n'
NIGHT_RATE = "[model.night]\nmiss = 0.5\n"


@pytest.mark.parametrize(
    ("instant", "window", "until"),
    [
        ("2025-01-01T21:59:59+08:00", "standard", "2025-01-01T22:00:00+08:00"),
        ("2025-01-01T22:00:00+08:00", "night", "2025-01-02T06:00:00+08:00"),
        ("2025-01-02T05:59:59+08:00", "night", "2025-01-02T06:00:00+08:00"),
        ("2025-01-02T06:00:00+08:00", "standard", "2025-01-02T22:00:00+08:00"),
        ("2025-01-01T14:00:00+00:00", "night", "2025-01-02T06:00:00+08:00"),
    ],
)
def test_a_window_crosses_midnight_in_its_own_time_zone(instant, window, until):
    night = card(zone="Asia/Shanghai", more=NIGHT, rates=NIGHT_RATE)
    pinned = night.at("m", ns(instant))
    miss, other = (500_000, "standard") if window == "night" else (1_000_000, "night")
    assert (pinned.ref.window, pinned.rates.miss) == (window, miss)
    assert (ns(until), other) == night.next_window(ns(instant))
    assert card().next_window(ns(instant)) is None


@pytest.mark.parametrize(
    ("instant", "name", "following"),
    [
        # On 30 March 2025 Berlin's clocks go from 02:00 to 03:00: half of the window is left.
        ("2025-03-30T00:59:59+00:00", "standard", ("2025-03-30T01:00:00+00:00", "early")),
        ("2025-03-30T01:00:00+00:00", "early", ("2025-03-30T01:30:00+00:00", "standard")),
        # On 26 October they go from 03:00 back to 02:00: the clock shows 02:30 twice.
        ("2025-10-26T00:29:59+00:00", "standard", ("2025-10-26T00:30:00+00:00", "early")),
        ("2025-10-26T00:30:00+00:00", "early", ("2025-10-26T01:00:00+00:00", "standard")),
        ("2025-10-26T01:00:00+00:00", "standard", ("2025-10-26T01:30:00+00:00", "early")),
        ("2025-10-26T01:30:00+00:00", "early", ("2025-10-26T02:30:00+00:00", "standard")),
    ],
)
def test_a_window_is_open_while_the_clock_on_the_wall_says_so(instant, name, following):
    """Where clocks are changed a window is shorter, or is open twice; the next change is told."""
    early = '[[window]]\nname = "early"\nstart = "02:30"\nend = "03:30"\n'
    berlin = card(zone="Europe/Berlin", more=early)
    assert name == berlin.window_at(ns(instant))
    assert (ns(following[0]), following[1]) == berlin.next_window(ns(instant))


def test_days_and_holidays_open_and_close_windows():
    shipped = find_card("peak-off-peak")
    assert shipped.window_at(ns("2025-04-30T12:00:00+08:00")) == "standard"  # a Wednesday
    assert shipped.window_at(ns("2025-05-01T12:00:00+08:00")) == "off_peak"  # a frozen holiday
    assert shipped.window_at(ns("2025-05-03T12:00:00+08:00")) == "weekend"
    assert shipped.window_at(ns("2025-05-03T23:45:00+08:00")) == "standard"


def rules(found: RateCard) -> set[str]:
    return {finding.rule for finding in lint(found)}


DAY = WINDOW.replace("00:30", "09:00").replace("08:30", "18:00")


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("pin-below-miss", {"rates": "storage = 0.5"}),
        (
            "pin-across-windows",
            {"more": DAY, "rates": "storage = 0.9\n[model.w]\nstorage=2\nmiss=2"},
        ),
        ("pin-across-windows", {"more": DAY, "rates": "[model.w]\nstorage = 2"}),
        ("hit-above-miss", {"rates": "hit_disk = 1.1"}),
        ("cold-below-hot", {"rates": "hit_device = 0.2"}),
        ("cold-below-hot", {"rates": "hit_remote = 0.01"}),
        ("free-hits", {"rates": "hit_device = 0\ncache_write = 0.5"}),
        ("write-never-pays", {"rates": "cache_write = 1"}),
        ("free", {"rates": "storage = 0"}),
        ("large-minimum", {"more": "minimum_cached_tokens = 5000"}),
        ("no-default", {"rates": "", "match": "a*"}),
        ("hit-above-miss", {"rates": "explicit_hit = 2"}),
        ("pin-below-miss", {"rates": "storage_minute = 0.01"}),
        ("unreported-below-miss", {"rates": "unreported = 0.5"}),
        ("write-then-mark", {"rates": "explicit_hit = 0.05\nexplicit_write = 1"}),
        ("free", {"rates": "storage_minute = 0"}),
        ("minimum-without-effect", {"rates": 'request = "0.01"\nminimum = "0.01"'}),
        ("longer-is-cheaper", {"rates": ABOVE}),
    ],
)
def test_lint_finds_cards_that_can_be_gamed(rule, changes):
    pattern = changes.get("match", "*")
    assert rule in rules(parse_card(card(**changes).text.replace('"*"', f'"{pattern}"')))


def test_lint_finds_what_is_free_and_refuses_nothing_that_cannot_be_gamed():
    text = card().text
    assert "free" in rules(parse_card(text.replace("hit = 0.1\nmiss = 1", "hit = 0\nmiss = 0")))
    assert "free" in rules(parse_card(text.replace('"2"', '"0"')))
    fair = card(rates="storage = 0.9\ncache_write = 0.2\nhit_disk = 0.2\nhit_remote = 0.3")
    same = card(more=DAY, rates="storage = 2\n[model.w]\nmiss = 2\nhit = 0.2")
    assert rules(fair) == rules(same) == set()


def test_lint_finds_cards_that_lose_money():
    cost = '[[cost]]\nmatch = "*"\nhit = 0.2\nmiss = 0.5\noutput = 3\n'
    found = [f for f in lint(card(rates=cost)) if f.rule == "below-cost"]
    cheap = {"hit_device", "hit_host", "hit_disk", "hit_remote", "output"}
    assert cheap == {f.message.split()[0] for f in found}
    assert all(f.level is Severity.ERROR for f in found)


@pytest.mark.parametrize(
    ("price", "cost", "found"), [("*", "big*", True), ("big*", "*", True), ("small", "big*", False)]
)
def test_lint_finds_the_models_that_a_price_and_a_cost_share(price, cost, found):
    paid = f'[[cost]]\nmatch = "{cost}"\nhit = 0\nmiss = 5\noutput = 0\n'
    text = card(rates=paid).text.replace('match = "*"', f'match = "{price}"', 1)
    assert found == ("below-cost" in rules(parse_card(text)))


def test_lint_finds_windows_that_overlap_also_on_a_holiday_alone():
    early = '[[window]]\nname = "early"\nstart = "05:00"\nend = "07:00"\n'
    assert "windows-overlap" in rules(card(more=NIGHT + early))
    assert "windows-overlap" not in rules(card(more=NIGHT + early.replace("05:00", "06:00")))
    apart = NIGHT + 'holidays = "all_day"\n' + DAY + 'days = ["sat", "sun"]\n'
    assert "windows-overlap" not in rules(card(more=apart))
    saturday = "holidays = [2028-01-01]\n"
    assert "windows-overlap" in rules(card(more=saturday + apart))


def test_the_digest_of_a_card_is_of_its_text():
    changed = parse_card(default_card().text + "# note\n")
    assert card_digest(changed) != card_digest(default_card())


@pytest.mark.parametrize("when", ["2027-03-28T02:30:00", '"2027-03-28T02:00:00"'])
def test_a_local_time_that_does_not_exist_is_refused(when):
    """Clocks in Berlin go from two to three."""
    berlin = BASE.format(**USUAL | {"valid_from": when, "zone": "Europe/Berlin"})
    with pytest.raises(PriceError, match="does not exist in Europe/Berlin"):
        parse_card(berlin)
    applied_card({"text": berlin, "applied_ns": 5})  # in an old ledger it stays readable
    parse_card(berlin.replace("T02:", "T03:"))
    parse_card(berlin.replace("2027-03-28", "2027-10-31"))  # twice: the first


NOON = "2025-07-01T12:00:00+00:00"


def shipped(name: str) -> RateCard:
    return parse_card(shipped_cards()[name], name)


def cost(name: str, usage: Usage, at: str = NOON, model: str = "m", **terms: object) -> str:
    pinned = shipped(name).at(model, ns(at), Terms(**terms))  # type: ignore[arg-type]
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
def test_a_shipped_card_charges_what_was_computed_by_hand(name, usage, terms, expected):
    assert expected == cost(name, usage, **terms)


def test_an_explicit_hit_is_a_line_of_its_own():
    used = Usage(hit_device=3_000, hit_disk=1_000, explicit_hit=2_500)
    lines = rate(used, shipped("explicit-cache").at("m", ns(NOON))).lines
    assert [("hit_device", 3_000, 160_000), ("hit_disk", 1_000, 160_000)] == [
        (line.name, line.tokens, line.per_token) for line in lines[:2]
    ]
    assert ("explicit_hit", 2_500, -80_000) == (lines[2].name, lines[2].tokens, lines[2].per_token)
    dearer = rate(used, shipped("explicit-cache").at("small-1", ns(NOON)))
    assert "0.000525" == format_units(dearer.amount)  # 1,500 x 0.10 + 2,500 x 0.15, a million


def test_a_fee_beside_a_minimum_is_a_line_of_its_own():
    """Tokens of 0.004 and a fee of 0.003 are 0.003 short of 0.01; 0.008 of tokens are not."""
    fee = {"request": "0.003", "minimum": "0.01"}
    charging = parse_card(card_text("c", priced("*", "1", "4", "20", **fee)))
    assert "minimum-without-effect" not in rules(charging)
    pinned = charging.at("m", ns(NOON))
    charged = [rate(Usage(miss=n), pinned) for n in (1_000, 2_000)]
    assert ["0.01", "0.011"] == [format_units(each.amount) for each in charged]
    assert [("miss", "0.004"), ("request", "0.003"), ("minimum", "0.003")] == [
        (line.name, format_units(line.amount)) for line in charged[0].lines
    ]
    assert ["0.006", "0.003"] == [format_units(each.fees) for each in charged]
    held = hold_amount(pinned, prompt_tokens=1_000, output_tokens=0)
    assert "0.01" == format_units(held)


def test_what_is_held_covers_what_is_charged():
    pinned = shipped("write-by-ttl").at("m", ns(NOON))
    used = Usage(miss=100, output=10, cache_write_1h=64)
    assert rate(used, pinned).amount <= hold_amount(pinned, prompt_tokens=100, output_tokens=10)
    least = hold_amount(pinned, prompt_tokens=1, output_tokens=1)
    assert format_units(least) == "0.001"


def test_a_groups_factor_ends_when_it_says():
    ends = GROUP.format("g", 0) + "until = 2025-02-01T00:00:00Z\n"
    ending = card(more=ends)
    acme = Terms(tenant="acme")
    assert 0 == ending.at("m", ns("2025-01-31T23:59:59+00:00"), acme).rates.miss
    assert 1_000_000 == ending.at("m", ns("2025-02-01T00:00:00+00:00"), acme).rates.miss
    assert "standard | g" == ending.at("m", ns("2025-01-02T00:00:00+00:00"), acme).ref.window
