"""What a request had written to the cache is metered, and who asked is kept with its charge."""

import pytest

from billing.money import UNITS
from billing.prices.cards import parse_card
from billing.proof import audit
from engine.request import Lookup
from tests.api.bank import CHAT, HELLO, PROMPT_TOKENS
from tests.api.conftest import serving
from tests.support.billing import card_text, priced
from tests.support.wire import Script
from tiers.errors import MissReason

LOOKUP = Lookup((), MissReason.ABSENT, block_size=4)
WRITES = {"valid_from": "2025-06-01T00:00:00Z", "factors": {"flex": "0.5"}}
CARD = card_text("writes", priced("*", "1", "2", "0", cache_write="4"), **WRITES)


@pytest.mark.parametrize(
    ("hits", "cache", "written"),
    [
        (0, True, PROMPT_TOKENS // 4 * 4),
        (8, True, PROMPT_TOKENS // 4 * 4 - 8),
        (PROMPT_TOKENS - 1, True, 0),  # the last token is computed, and nothing is written
        (0, False, 0),
    ],
)
async def test_computed_tokens_of_kept_blocks_are_a_write(bank, hits, cache, written):
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS)
        bank.accounts.apply_card(parse_card(CARD), by="test")
        house.engine.script = Script(hits={"hit_disk": hits}, lookup=LOOKUP)
        body = HELLO | {"cachesvc": {"cache": cache}}
        assert 200 == (await client.post(CHAT, json=body, headers=headers)).status_code
    charge = bank.charges()[-1]
    assert written == charge.details["usage"].get("cache_write", 0)
    computed = PROMPT_TOKENS - hits
    assert -charge.amount == (hits * 1 + computed * 2 + written * 4) * 10**6
    assert audit.verify(bank.store).problems == []


async def test_what_a_request_marks_is_hit_and_written_at_its_own_price(bank):
    marks = {"explicit_hit": "0.5", "explicit_write": "3"}
    explicit = card_text("writes", priced("*", "1", "2", "0", **marks), **WRITES)
    marked = {"type": "text", "text": "hello there", "cache_control": {"type": "ephemeral"}}
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS)
        bank.accounts.apply_card(parse_card(explicit), by="test")
        house.engine.script = Script(hits={"hit_disk": 4}, lookup=LOOKUP)
        asked = {
            "model": "bytes",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": [marked]}],
        }
        answer = await client.post("/v1/messages", json=asked, headers=headers)
    assert 200 == answer.status_code, answer.text
    charge = bank.charges()[-1]
    usage, told = charge.details["usage"], answer.json()["usage"]
    assert (4, 4) == (usage["hit_disk"], usage["explicit_hit"])
    assert 0 < usage["explicit_write"] <= usage["miss"]
    assert usage["explicit_write"] == told["cache_creation"]["ephemeral_5m_input_tokens"]
    price = 4 * 500_000 + usage["miss"] * 2_000_000 + usage["explicit_write"] * 3_000_000
    assert price == -charge.amount
    assert audit.verify(bank.store).problems == []


async def test_the_user_and_the_service_tier_are_kept_with_the_charge(bank):
    async with serving(bank) as (_, client, _):
        headers = bank.customer(UNITS)
        bank.accounts.apply_card(parse_card(CARD), by="test")
        labels = {"team": "search", "n": 1, "x" * 65: "long", "bad": "a\u0000b"}
        body = HELLO | {"user": "ann", "metadata": labels, "service_tier": "flex"}
        assert 200 == (await client.post(CHAT, json=body, headers=headers)).status_code
    charge = bank.charges()[-1]
    details = charge.details
    assert ("ann", {"team": "search"}) == (details["user"], details["tags"])
    assert "standard | flex" == details["window"]
    assert -charge.amount == PROMPT_TOKENS * 10**6
    assert audit.verify(bank.store).problems == []
