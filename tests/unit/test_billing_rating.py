"""Money, usage and rating: exact, and the same however it is computed."""

import ast
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import billing
from billing import money
from billing.errors import InvalidAmount, InvalidUsage
from billing.money import UNITS, format_units, parse_amount
from billing.prices.book import STANDARD
from billing.prices.cards import default_card, parse_card, shipped_cards
from billing.prices.lint import lint
from billing.prices.rating import hold_amount, rate, short_hits
from billing.reports.documents import price_text
from billing.usage import CLASSES, Usage
from tests.support.billing import START_NS

COUNT = st.integers(0, 10**7)
HITS = ("hit_device", "hit_host", "hit_disk", "hit_remote")
USAGES = st.builds(
    lambda unreported, **counts: Usage(unreported=min(unreported, counts["miss"]), **counts),
    **dict.fromkeys((*HITS, "miss", "output", "storage_token_hours", "unreported"), COUNT),
)


def unreported(price: str) -> str:
    """The launch card with a price for unreported prompts."""
    return shipped_cards()["deepseek-launch"] + f'\nunreported = "{price}"\n'


PINNED = [
    parse_card(text).pin("m", window)
    for text in (*shipped_cards().values(), *map(unreported, ("2.5", "0.3", "refused")))
    for window in parse_card(text).price_of("m").rates  # type: ignore[union-attr]
]


def test_no_float_comes_near_money():
    """Seconds may be floats, and the lengths of a printed page; a module of amounts has no float
    literal, cast or division."""
    timed = {
        "accounts.py", "documents.py", "ledger.py", "prover.py", "store.py", "claim.py",
        "group_commit.py", "heads.py", "inbox.py", "outgoing.py", "push.py", "sweeper.py",
        "syncer.py",
    }  # fmt: skip
    for path in Path(billing.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            assert not isinstance(getattr(node, "op", None), ast.Div) or _is_path(node), where
            if path.name not in timed:
                assert not isinstance(node, ast.Constant) or type(node.value) is not float, where
                assert not isinstance(node, ast.Name) or node.id != "float", where


def _is_path(node: ast.AST) -> bool:
    """`/` joins paths when one side is a text or a name in capitals of one."""
    right = getattr(node, "right", None)
    return isinstance(right, ast.Constant | ast.Name) and not (
        isinstance(right, ast.Constant) and not isinstance(right.value, str)
    )


@given(st.integers(1 - 10**27, 10**27 - 1))  # what can be said: 15 digits before the point
def test_an_amount_survives_its_text(units):
    assert parse_amount(format_units(units)) == units


@given(st.integers(-(10**20), 10**20), st.integers(0, 12))
def test_rounding_is_half_even(units, places):
    exact = Fraction(units, UNITS)
    expected = round(exact * 10**places)  # Fraction rounds half to even
    assert money.round_half_even(units, places) * 10**places == expected * UNITS
    assert Decimal(format_units(units, places)) == Decimal(expected).scaleb(-places)


@pytest.mark.parametrize("text", ["", "x", "1e5", "NaN", "1.", ".5", "0x1", "1,5", "--1"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(InvalidAmount, match="is not an amount"):
        parse_amount(text)
    with pytest.raises(InvalidAmount, match="12 decimal places"):
        parse_amount("0.0000000000001")
    with pytest.raises(InvalidAmount, match="above zero"):
        money.parse_positive("0.00")


def test_a_rate_is_whole_units_a_token():
    assert money.units_per_token(Decimal("0.028"), "hit") == 28_000
    assert money.rate_per_million(28_000) == "0.028"
    with pytest.raises(InvalidAmount, match="six decimal places"):
        money.units_per_token(Decimal("0.0000001"), "hit")


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("count", [-1, 1.0, True, "1", None])
def test_a_count_is_a_whole_number(name, count):
    with pytest.raises(InvalidUsage, match=name):
        Usage(**{name: count})  # type: ignore[arg-type]


def test_usage_of_the_engines_counts_adds_up_to_the_prompt():
    from engine.request import TokenCounts

    counts = TokenCounts(prompt=100, hit_device=10, hit_host=20, hit_disk=30, output=5)
    usage = Usage.from_counts(counts)
    assert (usage.hit, usage.miss, usage.prompt, usage.output) == (60, 40, 100, 5)
    with pytest.raises(InvalidUsage, match="in a prompt of 9"):
        Usage.from_counts(TokenCounts(prompt=9, hit_device=10))


@given(USAGES)
def test_a_usage_survives_its_record(usage):
    assert Usage.from_record(usage.record()) == usage
    with pytest.raises(InvalidUsage, match="tape"):
        Usage.from_record(usage.record() | {"hit_tape": 1})


@pytest.mark.parametrize("pinned", PINNED, ids=lambda pinned: "-".join(pinned.ref))
@given(usage=USAGES)
def test_a_charge_is_the_sum_of_its_lines_and_covered_by_its_hold(pinned, usage):  # type: ignore[no-untyped-def]
    charge = rate(usage, pinned)
    assert charge.amount == sum(line.tokens * line.per_token for line in charge.lines)
    uncached = usage.prompt * pinned.rates.miss + usage.output * pinned.rates.output
    uncached += usage.unreported * (pinned.rates.unreported or 0)
    assert charge.amount - charge.fees + charge.saved == uncached
    held = hold_amount(pinned, prompt_tokens=max(1, usage.prompt), output_tokens=usage.output)
    storage = usage.storage_token_hours * (pinned.rates.storage or 0)
    assert charge.amount - storage <= held


@pytest.mark.parametrize("price", ["2.50", "0.30", "0.00", "refused"])
@given(usage=USAGES)
def test_an_unreported_prompt_costs_what_the_card_says_and_saves_nothing(price, usage):
    """A miss is 1 a million there. What nobody reports, though it is refused, is a client's cut."""
    card = parse_card(unreported(price))
    more, plain = (rate(usage, each.pin("m", STANDARD)) for each in (card, default_card()))
    each = 0 if price == "refused" else int(Decimal(price) * 10**6) - 10**6
    assert more.amount - plain.amount == usage.unreported * each
    assert more.saved == plain.saved, "no cache is behind it"
    rules = {each.rule for each in lint(card)}
    assert (price in ("0.30", "0.00")) == ("unreported-below-miss" in rules)
    [shown] = {price_text(rates, "unreported") for rates in card.models[0].rates.values()}
    assert price == shown


@given(USAGES, USAGES)
def test_a_card_without_a_minimum_rates_the_sum_as_the_sum(one, two):
    pinned = parse_card(shipped_cards()["peak-off-peak"]).pin("m", STANDARD)
    whole = rate(one + two, pinned).amount
    assert whole == rate(one, pinned).amount + rate(two, pinned).amount


def test_hits_below_the_minimum_cost_as_misses_and_stay_hits_in_the_usage():
    pinned = default_card().at("m", START_NS)
    small, enough = Usage(hit_host=63, miss=1), Usage(hit_host=64)
    assert rate(small, pinned).amount == 64 * pinned.rates.miss
    assert rate(enough, pinned).amount == 64 * pinned.rates.hit_host
    assert rate(small, pinned).lines[0].name == "hit_host"
    assert short_hits(small, pinned) == "63 hits, fewer than the card's 64: priced as misses"
    one = "1 hit, fewer than the card's 64: priced as misses"
    assert short_hits(Usage(hit_disk=1), pinned) == one
    assert short_hits(enough, pinned) is short_hits(Usage(miss=9), pinned) is None
