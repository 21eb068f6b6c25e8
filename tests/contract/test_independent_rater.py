"""A rater of its own, written from docs/billing.md with decimals, agrees with every charge.

It shares no code with billing: it reads the cards' TOML, the admission, tenant, model and usage of
each entry out of the database, and says what it costs.
"""

import json
import random
import sqlite3
import tomllib
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.gate.holds import RequestContext
from billing.gate.outcomes import Outcome
from billing.money import UNITS
from billing.prices.book import Terms
from billing.prices.cards import parse_card
from billing.proof import audit
from billing.usage import Usage
from tests.support.billing import running_ledger

DAYS = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
HITS = ("hit_device", "hit_host", "hit_disk", "hit_remote")
Card = dict[str, Any]
SCOPES = [["big-*"], ["small"], ["*@flex"], ["big-1@night", "big-2"], ["*@friends"], ["*"]]
SCOPES += [["*@standard"], ["small@noon"]]


def in_force(cards: list[Card], tenant: str, model: str, at: datetime) -> Card:
    """A tenant's own card if one has begun, has not ended and has the model; else everybody's."""
    for wanted in (True, False):
        fits = [
            card
            for card in cards
            if (
                tenant in card["card"].get("tenants", [])
                if wanted
                else "tenants" not in card["card"]
            )
            and card["card"]["valid_from"] <= at
            and ("valid_until" not in card["card"] or at < card["card"]["valid_until"])
        ]
        if fits:
            card = max(fits, key=lambda card: card["card"]["valid_from"])
            if priced(card, model) is not None:
                return card
    raise AssertionError("no card")


def priced(card: Card, model: str) -> dict[str, Any] | None:
    exact = [m for m in card["model"] if m["match"] == model]
    begins = [
        m for m in card["model"] if m["match"].endswith("*") and model.startswith(m["match"][:-1])
    ]
    longest = sorted(begins, key=lambda m: len(m["match"]))
    return exact[0] if exact else longest[-1] if longest else None


def window(card: Card, at: datetime) -> str | None:
    local = at.astimezone(ZoneInfo(card["card"].get("time_zone", "UTC")))
    for each in card.get("window", []):
        start, end = each["start"], each["end"]
        clock, today = local.strftime("%H:%M"), DAYS[local.weekday()]
        yesterday = DAYS[(local - timedelta(days=1)).weekday()]
        days = each.get("days", DAYS)
        if start < end:
            is_open = start <= clock < end and today in days
        else:  # over midnight: it belongs to the day on which it opens
            is_open = (clock >= start and today in days) or (clock < end and yesterday in days)
        if is_open:
            return str(each["name"])
    return None


def cost(
    cards: list[Card],
    tenant: str,
    model: str,
    at: datetime,
    used: dict[str, int],
    asked: tuple[int, str],
    spent: dict[tuple[str, str, str, str], int],
) -> Decimal:
    card = in_force(cards, tenant, model, at)
    price = priced(card, model)
    assert price is not None
    rates: dict[str, Any] = {k: v for k, v in price.items() if not isinstance(v, dict | list)}
    changes: dict[str, Any] = price.get(window(card, at) or "", {})
    prompt_tokens, service = asked
    for longer in sorted(price.get("above", []), key=lambda each: each["prompt_tokens"]):
        if prompt_tokens > longer["prompt_tokens"]:
            changes = longer
    if "hit" in changes:
        rates = {k: v for k, v in rates.items() if k not in HITS}
    rates = rates | changes
    factor = Decimal(1)
    for group in card.get("group", []):
        if tenant in group["tenants"] and ("until" not in group or at < group["until"]):
            factor *= Decimal(str(group["factor"]))
    for tier in card.get("service", []):
        if tier["name"] == service:
            factor *= Decimal(str(tier["factor"]))

    def rate(name: str, other: str = "") -> Decimal:
        return Decimal(str(rates.get(name, rates.get(other, 0))))

    hits = sum(used.get(name, 0) for name in HITS)
    is_short = hits < card["card"].get("minimum_cached_tokens", 0)
    total = sum(
        (used.get(h, 0) * (rate("miss") if is_short else rate(h, "hit")) for h in HITS), Decimal(0)
    )
    total += used.get("miss", 0) * rate("miss") + used.get("output", 0) * rate("output")
    total += used.get("cache_write", 0) * rate("cache_write")
    marked = "explicit_write" if "explicit_write" in rates else "cache_write"
    total += used.get("explicit_write", 0) * rate(marked)
    total += used.get("cache_write_1h", 0) * rate("cache_write_1h", marked)
    if "explicit_hit" in rates and not is_short:  # instead of what other hits cost
        total += used.get("explicit_hit", 0) * (rate("explicit_hit") - rate("hit"))
    total += used.get("storage_token_minutes", 0) * rate("storage_minute")
    free = included(card, tenant, model, at, used, spent)
    off = Decimal(0)
    for name, tokens in free.items():
        price_of = rate(name, marked if name == "cache_write_1h" else "")
        if name == "explicit_write":
            price_of = rate(marked)
        if name in HITS:
            price_of = rate("miss") if is_short else rate(name, "hit")
        off += tokens * price_of * factor / 10**6
    total *= factor / 10**6
    if used.get("miss", 0) + used.get("output", 0) + hits:
        total = max(total + rate("request") * factor, rate("minimum") * factor)
    return total - off


def included(
    card: Card,
    tenant: str,
    model: str,
    at: datetime,
    used: dict[str, int],
    spent: dict[tuple[str, str, str, str], int],
) -> dict[str, int]:
    """How many tokens of each class cost nothing; item by item, class by class."""
    free: dict[str, int] = {}
    for item in card.get("included", []):
        match = item.get("match", "*")
        if match != model and not (match.endswith("*") and model.startswith(match[:-1])):
            continue
        key = (tenant, at.strftime("%Y-%m"), card["card"]["name"], item["name"])
        for name in [n for c in item["classes"] for n in (HITS if c == "hit" else (c,))]:
            left = item["tokens"] - spent.get(key, 0)
            tokens = min(left, used.get(name, 0) - free.get(name, 0))
            spent[key] = spent.get(key, 0) + tokens
            free[name] = free.get(name, 0) + tokens
    return free


def terms_of(card: Card, tenant: str, at: datetime, asked: tuple[int, str], model: str) -> set[str]:
    """What a scope can name of a price: its window, the tenant's groups, the service tier."""
    price = priced(card, model)
    assert price is not None
    is_long = any(asked[0] > longer["prompt_tokens"] for longer in price.get("above", []))
    found = set() if is_long else {window(card, at) or "standard"}
    for group in card.get("group", []):
        if tenant in group["tenants"] and ("until" not in group or at < group["until"]):
            found.add(group["name"])
    return found | {tier["name"] for tier in card.get("service", []) if tier["name"] == asked[1]}


Grants = dict[int, tuple[float, list[str], Decimal]]  # by entry: when it ends, scope, left


def from_grants(grants: Grants, model: str, said: set[str], amount: Decimal) -> dict[int, Decimal]:
    """What of a charge is paid by grants for its price, those first that end first."""
    taken = {}
    for seq, (ends, scope, left) in sorted(grants.items(), key=lambda each: (each[1][0], each[0])):
        for each in scope:
            name, _, term = each.partition("@")
            same = model.startswith(name[:-1]) if name.endswith("*") else model == name
            if same and (not term or term in said) and min(left, amount):
                taken[seq] = min(left, amount)
                grants[seq] = (ends, scope, left - taken[seq])
                amount -= taken[seq]
                break
    return taken


def moved(postings: str) -> dict[str, Decimal]:
    pairs = (part.split(":") for part in postings.split())
    return {name: Decimal(units) for name, units in pairs}


def card_text(draw: random.Random, number: int, valid_from: str, tenant: str | None) -> str:
    def price(most: int) -> str:
        return f'"{draw.randrange(most)}.{draw.randrange(100):02}"'

    lines = ["[card]", f'name = "c{number}"', 'version = "1"', f"valid_from = {valid_from}"]
    lines += ['currency = "CNY"', f"minimum_cached_tokens = {draw.choice([0, 64, 1024])}"]
    lines.append(f'time_zone = "{draw.choice(["UTC", "Asia/Shanghai", "America/New_York"])}"')
    if tenant:
        lines.append(f'tenants = ["{tenant}"]')
        if draw.random() < 0.5:
            lines.append("valid_until = 2025-01-20T00:00:00Z")
    windows = draw.random() < 0.5
    if windows:
        lines += ["[[window]]", 'name = "night"', 'start = "22:30"', 'end = "06:15"']
        lines += [
            "[[window]]",
            'name = "noon"',
            'start = "11:00"',
            'end = "13:00"',
            'days = ["mon", "sun"]',
        ]
    lines += ["[[group]]", 'name = "friends"', 'tenants = ["bolt"]', 'factor = "0.85"']
    if draw.random() < 0.5:
        lines.append("until = 2025-01-15T12:00:00Z")
    lines += ["[[service]]", 'name = "flex"', 'factor = "0.5"']
    explicit = draw.random() < 0.5  # then no hits are included
    for item in draw.sample([["miss", "hit"], ["output"], ["cache_write", "hit", "miss"]], 2):
        if explicit:
            item = ["explicit_write" if name == "hit" else name for name in item]
        lines += ["[[included]]", f'name = "{item[0]}"', f"classes = {item}"]
        lines += [f"match = '{draw.choice(['*', 'big-*', 'big-1'])}'"]
        lines += [f"tokens = {draw.choice([1, 2000, 40000])}"]
    for match in ["big-*"] if tenant else ["*", "big-*", "big-1"]:
        lines += ["[[model]]", f'match = "{match}"', f"hit = {price(2)}", f"miss = {price(9)}"]
        lines += [f"output = {price(40)}"]
        if draw.random() < 0.5:
            lines += [f"cache_write = {price(3)}", f"storage_minute = {price(2)}"]
        if explicit:
            lines += [f"explicit_hit = {price(2)}", f"explicit_write = {price(3)}"]
        else:
            lines += [f"hit_disk = {price(2)}"]
        if draw.random() < 0.5:
            lines += [f"cache_write_1h = {price(3)}", 'request = "0.0001"', 'minimum = "0.002"']
        if windows:
            lines += ["[model.night]", f"hit = {price(2)}", "[model.noon]", f"output = {price(9)}"]
        elif draw.random() < 0.7:
            lines += [
                "[[model.above]]",
                "prompt_tokens = 1000",
                f"miss = {price(9)}",
                f"hit = {price(2)}",
            ]
            lines += ["[[model.above]]", "prompt_tokens = 3000", f"output = {price(90)}"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("seed", range(6))
def test_an_independent_rater_agrees_with_every_charge(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    path = tmp_path / "ledger"
    texts = [card_text(draw, 0, "2024-12-01T00:00:00Z", None)]
    texts.append(card_text(draw, 1, "2025-01-10T08:00:00Z", None))
    texts.append(card_text(draw, 2, "2025-01-05T00:00:00Z", "acme"))
    asked: dict[str, tuple[int, str]] = {}
    named = [f'"{name}"' for name in ("night", "noon") if f'"{name}"' not in "".join(texts)]
    scopes = [each for each in SCOPES if not any(n.strip('"') in str(each) for n in named)]
    with running_ledger(f"sqlite:///{path}") as house:
        house.accounts.create_tenant("bolt", "CNY", credit_limit=None, by="test")
        house.fund(10**9 * UNITS)
        for text in texts:
            house.accounts.apply_card(parse_card(text), by="test")
        for number in range(250):
            house.clock.advance(draw.randrange(2 * 30 * 86_400 // 250))
            if draw.random() < 0.1:
                tenant, scope = draw.choice(["acme", "bolt"]), draw.choice(scopes)
                ends = house.clock() + draw.randrange(1, 40 * 86_400) * 10**9
                about = {"reference": f"g{number}", "by": "eve", "scope": scope}
                amount = draw.randrange(1, 10**11)
                house.ledger.post(
                    Deposit(tenant, Kind.GRANT, amount=amount, expires_ns=ends, **about)
                ).result()
            if draw.random() < 0.1:
                house.ledger.expire()
            tenant, model = draw.choice(["acme", "bolt"]), draw.choice(["small", "big-1", "big-2"])
            miss = draw.choice([1, 50, 900, 1000, 1001, 5000])
            used = Usage(
                **{name: draw.choice([0, 0, 17, 640]) for name in HITS},
                miss=miss,
                output=draw.randrange(400),
                cache_write=draw.choice([0, miss // 4]),
                explicit_write=draw.choice([0, miss // 4]),
                cache_write_1h=draw.choice([0, miss // 2]),
            )
            used = replace(used, explicit_hit=draw.choice([0, used.hit // 2, used.hit]))
            if draw.random() < 0.1:
                used = Usage(storage_token_minutes=draw.randrange(1, 9000))
            service = draw.choice(["", "auto", "flex"])
            terms = Terms(tenant=tenant, prompt_tokens=used.prompt, service=service)
            pinned = house.ledger.book.at(model, house.clock(), "CNY", terms)
            context = RequestContext(admitted_ns=house.clock())
            hold = house.ledger.reserve(tenant, f"r{number}", 0, pinned, context=context).result()
            house.ledger.settle(hold, used, Outcome.FINISHED).result()
            asked[f"r{number}"] = used.prompt, service
        assert audit.verify(house.ledger.store).problems == []
    launch = Path("billing/rate_cards/deepseek-launch.toml").read_text()
    cards = [tomllib.loads(text, parse_float=Decimal) for text in (launch, *texts)]
    with closing(sqlite3.connect(path)) as plain:
        rows = plain.execute(
            "SELECT tenant, seq, kind, request_id, postings, body FROM entries ORDER BY tenant, seq"
        ).fetchall()
    assert sum(row[2] == "charge" for row in rows) == 250
    grants: dict[str, Grants] = {"acme": {}, "bolt": {}}
    paid = 0
    spent: dict[tuple[str, str, str, str], int] = {}
    for tenant, seq, kind, request_id, postings, body in rows:
        said, units = json.loads(body), moved(postings)
        if kind == "grant":
            ends = said.get("expires_ns", float("inf"))
            grants[tenant][seq] = ends, said["scope"], units["scoped"]
        if kind == "expiry":
            _, _, left = grants[tenant].pop(said["corrects"])
            assert units == ({"scoped": -left, "promotion": left} if left else {})
        if kind != "charge":
            continue
        at = datetime.fromtimestamp(said["admitted_ns"] // 10**9, UTC)
        expected = cost(
            cards, tenant, said["model"], at, said.get("usage", {}), asked[request_id], spent
        )
        assert expected * 10**12 == units.get("revenue", 0), (tenant, request_id, said)
        card = in_force(cards, tenant, said["model"], at)
        fit = terms_of(card, tenant, at, asked[request_id], said["model"])
        taken = from_grants(grants[tenant], said["model"], fit, expected * 10**12)
        assert {int(n): -Decimal(u) for n, u in said.get("scoped", {}).items()} == taken
        assert sum(taken.values()) == -units.get("scoped", Decimal(0))
        paid += bool(taken)
    assert paid > 20
