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
from billing.money import UNITS
from billing.prices.book import Terms
from billing.prices.cards import parse_card
from billing.proof import audit
from billing.usage import Usage
from tests.support.billing import running_ledger

DAYS = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
HITS = ("hit_device", "hit_host", "hit_disk", "hit_remote")
Card = dict[str, Any]


def in_force(cards, tenant, model, at):
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


def priced(card, model):
    exact = [m for m in card["model"] if m["match"] == model]
    begins = [
        m for m in card["model"] if m["match"].endswith("*") and model.startswith(m["match"][:-1])
    ]
    longest = sorted(begins, key=lambda m: len(m["match"]))
    return exact[0] if exact else longest[-1] if longest else None


def window(card, at):
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


def cost(cards, tenant, model, at, used, asked):
    card = in_force(cards, tenant, model, at)
    price = priced(card, model)
    rates = {k: v for k, v in price.items() if not isinstance(v, dict | list)}
    changes = price.get(window(card, at) or "", {})
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

    def rate(name, other=""):
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
    total += used.get("unreported", 0) * (rate("unreported", "miss") - rate("miss"))
    total += used.get("storage_token_minutes", 0) * rate("storage_minute")
    total *= factor / 10**6
    if used.get("miss", 0) + used.get("output", 0) + hits:
        total = max(total + rate("request") * factor, rate("minimum") * factor)
    return total


def moved(postings):
    pairs = (part.split(":") for part in postings.split())
    return {name: Decimal(units) for name, units in pairs}


def card_text(draw, number, valid_from, tenant):
    def price(most):
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
        lines += ['[[window]]\nname = "night"\nstart = "22:30"\nend = "06:15"']
        lines += [
            '[[window]]\nname = "noon"\nstart = "11:00"\nend = "13:00"\ndays = ["mon", "sun"]'
        ]
    lines += ["[[group]]", 'name = "friends"', 'tenants = ["bolt"]', 'factor = "0.85"']
    if draw.random() < 0.5:
        lines.append("until = 2025-01-15T12:00:00Z")
    lines += ["[[service]]", 'name = "flex"', 'factor = "0.5"']
    explicit = draw.random() < 0.5
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
        if draw.random() < 0.5:
            lines += [f"unreported = {price(9)}"]
        if windows:
            lines += ["[model.night]", f"hit = {price(2)}", "[model.noon]", f"output = {price(9)}"]
        elif draw.random() < 0.7:
            lines += ["[[model.above]]\nprompt_tokens = 1000"]
            lines += [f"miss = {price(9)}", f"hit = {price(2)}"]
            lines += ["[[model.above]]", "prompt_tokens = 3000", f"output = {price(90)}"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("seed", range(6))
def test_an_independent_rater_agrees_with_every_charge(tmp_path, seed):
    draw = random.Random(seed)
    path = tmp_path / "ledger"
    texts = [card_text(draw, 0, "2024-12-01T00:00:00Z", None)]
    texts.append(card_text(draw, 1, "2025-01-10T08:00:00Z", None))
    texts.append(card_text(draw, 2, "2025-01-05T00:00:00Z", "acme"))
    asked = {}
    with running_ledger(f"sqlite:///{path}") as house:
        house.accounts.create_tenant("bolt", "CNY", credit_limit=None, by="test")
        house.fund(10**9 * UNITS)
        for text in texts:
            house.accounts.apply_card(parse_card(text), by="test")
        for number in range(250):
            house.clock.advance(draw.randrange(2 * 30 * 86_400 // 250))
            if draw.random() < 0.1:
                tenant = draw.choice(["acme", "bolt"])
                ends = house.clock() + draw.randrange(1, 40 * 86_400) * 10**9
                about = {"reference": f"g{number}", "by": "eve", "expires_ns": ends}
                amount = draw.randrange(1, 10**11)
                house.ledger.post(Deposit(tenant, Kind.GRANT, amount=amount, **about)).result()
            if draw.random() < 0.1:
                house.ledger.sweeper.expire()
            tenant, model = draw.choice(["acme", "bolt"]), draw.choice(["small", "big-1", "big-2"])
            miss = draw.choice([1, 50, 900, 1000, 1001, 5000])
            used = Usage(
                **{name: draw.choice([0, 0, 17, 640]) for name in HITS},
                miss=miss,
                output=draw.randrange(400),
                cache_write=draw.choice([0, miss // 4]),
                explicit_write=draw.choice([0, miss // 4]),
                cache_write_1h=draw.choice([0, miss // 2]),
                unreported=draw.choice([0, 0, miss]),
            )
            used = replace(used, explicit_hit=draw.choice([0, used.hit // 2, used.hit]))
            if draw.random() < 0.1:
                used = Usage(storage_token_minutes=draw.randrange(1, 9000))
            service = draw.choice(["", "auto", "flex"])
            terms = Terms(tenant=tenant, prompt_tokens=used.prompt, service=service)
            pinned = house.ledger.book.at(model, house.clock(), "CNY", terms)
            context = RequestContext(admitted_ns=house.clock())
            hold = house.ledger.reserve(tenant, f"r{number}", 0, pinned, context=context).result()
            house.settle(hold, used)
            asked[f"r{number}"] = used.prompt, service
        assert audit.verify(house.ledger.store).problems == []
    launch = Path("billing/rate_cards/deepseek-launch.toml").read_text()
    cards = [tomllib.loads(text, parse_float=Decimal) for text in (launch, *texts)]
    with closing(sqlite3.connect(path)) as plain:
        rows = plain.execute(
            "SELECT tenant, seq, kind, request_id, postings, body FROM entries ORDER BY tenant, seq"
        ).fetchall()
    assert sum(row[2] == "charge" for row in rows) == 250
    grants = {"acme": {}, "bolt": {}}
    free = {"acme": Decimal(0), "bolt": Decimal(0)}
    paid = 0
    for tenant, seq, kind, request_id, postings, body in rows:
        said, units = json.loads(body), moved(postings)
        if kind == "grant":
            grants[tenant][seq] = said["expires_ns"], units["granted"]
        if kind == "expiry":
            ends, amount = grants[tenant].pop(said["corrects"])
            later = sum(n for at, n in grants[tenant].values() if at > ends)
            left = min(amount, max(Decimal(0), free[tenant] - later))
            assert units == ({"granted": -left, "promotion": left} if left else {})
        if kind == "charge":
            at = datetime.fromtimestamp(said["admitted_ns"] // 10**9, UTC)
            asks = asked[request_id]
            expected = cost(cards, tenant, said["model"], at, said.get("usage", {}), asks)
            assert expected * 10**12 == units.get("revenue", 0), (tenant, request_id, said)
            taken = min(free[tenant], expected * 10**12)
            assert -taken == units.get("granted", 0)
            paid += bool(taken)
        free[tenant] += units.get("granted", 0)
    assert paid > 20
