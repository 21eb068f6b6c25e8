"""Tenants' blocks are kept apart by their salts; limits count misses and never hits."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits.aio.storage import MemoryStorage
from limits.errors import StorageError

from api.access.auth import KeyGate, Salts, bearer_token
from api.access.concurrency import CircuitBreaker
from api.access.rate_limits import LimitSettings, Quota, WindowLimits
from api.errors import MissingKey, MissingScope, RateLimited
from billing.accounts import Accounts
from billing.errors import KeyExpired, KeyRevoked, UnknownKey
from billing.keys import Principal
from billing.prices.cards import default_card
from billing.usage import EMPTY, Usage
from tests.api.bank import CHAT, HELLO, PROMPT_TOKENS
from tests.api.conftest import GateOf, begun, of, refusal, running
from tests.api.driver import Visit
from tests.support.wire import FakeHouse, OpenGate, Script, fake_house

ACME = Principal("acme", key_id="key_1")


@given(st.text(), st.text())
def test_salts_differ_by_tenant_secret_and_kind(one, other):
    salts = Salts(b"secret", {one: frozenset({"*"})})
    assert (one == other) == (salts.of_tenant(one) == salts.of_tenant(other))
    assert salts.of_tenant(one) != Salts(b"other").of_tenant(one)
    assert salts.of_tenant(one) != salts.of_group(one, other)
    assert "secret" not in repr(salts)


async def test_a_tenants_salt_is_in_its_scope_and_nowhere_else():
    house = fake_house(gatekeeper=GateOf("acme", "bolt"))
    async with running(house) as (_, client):
        for _ in range(2):
            await client.post(CHAT, json=HELLO | {"user": "acme"})
    acme, bolt = (request.scope for request in house.engine.requests)
    assert acme.root() != bolt.root()
    assert b"acme" not in acme.tenant


async def test_members_of_a_group_share_and_others_may_not():
    salts = Salts(b"secret", {"prompts": frozenset({"acme", "bolt"})})
    assert salts.of_group("prompts", "acme") == salts.of_group("prompts", "bolt")
    with pytest.raises(MissingScope):
        salts.of_group("prompts", "carl")
    house = fake_house(salts=salts, gatekeeper=OpenGate(Principal("acme")))
    async with running(house) as (_, client):
        await client.post(CHAT, json=HELLO | {"cachesvc": {"share": "prompts"}})
    assert salts.of_group("prompts", "bolt") == house.engine.requests[0].scope.tenant


def test_bearer_tokens():
    for header, token in (("Bearer sk-1", "sk-1"), ("bearer  sk-1 ", "sk-1"), ("Basic abc", None)):
        assert token == bearer_token(header)
    assert [None] * 3 == [bearer_token(header) for header in ("Bearer ", "", None)]


@pytest.mark.parametrize("with_keys", [False, True])
async def test_the_caller_is_identified_without_a_thread(bank, monkeypatch, with_keys):
    """The store is looked into at most twice a second; the requests between need no thread."""
    authorization = bank.customer(0)["authorization"] if with_keys else None
    bank.accounts.prepare(default_card())
    gate = KeyGate(bank.accounts)
    first = await gate.identify(authorization)
    look, looks = gate._look, 0

    def counted(token: str | None) -> Principal:
        nonlocal looks
        looks += 1
        return look(token)

    monkeypatch.setattr(gate, "_look", counted)
    bank.accounts.refresh()
    assert [first] * 20 == [await gate.identify(authorization) for _ in range(20)]
    assert 0 == looks
    bank.accounts._looked_s -= 1
    assert first == await gate.identify(authorization)
    assert 1 == looks


async def test_a_revoked_or_expired_key_is_refused_from_memory_too(bank):
    bank.accounts.create_tenant("acme", "CNY", by="test")
    gate = KeyGate(bank.accounts)
    key, info = bank.accounts.create_key("acme", by="test")
    old, _ = bank.accounts.create_key("acme", by="test", expires_ns=1)
    assert "acme" == (await gate.identify(f"Bearer {key}")).tenant
    bank.accounts.revoke_key(info.key_id, by="test")
    with pytest.raises(KeyRevoked):
        await gate.identify(f"Bearer {key}")
    with pytest.raises(KeyExpired):
        await gate.identify(f"Bearer {old}")
    with pytest.raises(UnknownKey):
        await gate.identify("Bearer sk-other")
    with pytest.raises(MissingKey):
        await gate.identify(None)


async def test_the_first_key_counts_at_once_where_another_process_made_it(bank):
    """A request that carries it is not the open tenant's, which pays nothing."""
    gate, elsewhere = KeyGate(bank.accounts), Accounts(bank.accounts.store)
    elsewhere.create_tenant("acme", "CNY", by="test")
    bank.accounts.refresh()
    assert "acme" != (await gate.identify("Bearer sk-placeholder")).tenant
    key, _ = elsewhere.create_key("acme", by="test")
    assert "acme" == (await gate.identify(f"Bearer {key}")).tenant


def limited(**quota: int) -> FakeHouse:
    settings = LimitSettings(tenant=Quota(**quota))
    return fake_house(limits=WindowLimits(settings, MemoryStorage()))


async def test_requests_run_out():
    house = limited(requests=2)
    async with running(house) as (_, client):
        first = await client.post(CHAT, json=HELLO)
        told = (f"x-ratelimit-{what}-requests" for what in ("limit", "remaining"))
        assert ("2", "1") == of(first.headers, *told)
        await client.post(CHAT, json=HELLO | {"stream": True})
        refused = await client.post(CHAT, json=HELLO)
        assert (429, "rate_limit_exceeded") == refusal(refused)
        assert "rate_limit_error" == refused.json()["error"]["type"]
        assert 1 <= int(refused.headers["retry-after"]) <= 61
        assert "0" == refused.headers["x-ratelimit-remaining-requests"]
        assert 2 == len(house.meter.charges)


async def test_a_request_that_the_ledger_refuses_uses_up_no_limit(bank):
    headers = bank.customer(10**12)
    limits = WindowLimits(LimitSettings(tenant=Quota(requests=1)), MemoryStorage())
    wire = bank.house.wire
    house = replace(bank.house, wire=replace(wire, access=replace(wire.access, limits=limits)))
    watch, set_right = bank.ledger._watch, bank.ledger._watch._clock_ns
    async with running(house) as (_, client):
        watch._clock_ns = lambda: set_right() + 3600 * 10**9
        for _ in range(3):
            refused = await client.post(CHAT, json=HELLO, headers=headers)
            assert (503, "ledger_unavailable") == refusal(refused)
        watch._clock_ns = set_right
        assert 200 == (await client.post(CHAT, json=HELLO, headers=headers)).status_code
        assert 429 == (await client.post(CHAT, json=HELLO, headers=headers)).status_code


async def test_end_users_have_limits_of_their_own_where_the_tenant_is_divided():
    overrides: dict[str, int] = {}
    limits = WindowLimits(LimitSettings(), MemoryStorage(), overrides=lambda tenant: overrides)
    house = fake_house(limits=limits)
    async with running(house) as (_, client):

        async def ask(**user: str) -> Any:
            return await client.post(CHAT, json=HELLO | user)

        for _ in range(3):
            assert 200 == (await ask(user_id="anna")).status_code
        assert not house.engine.requests[-1].share.count("\0")
        overrides["user_requests"] = 2
        for _ in range(2):
            assert 200 == (await ask(user_id="anna")).status_code
        refused = await ask(user_id="anna")
        assert (429, "rate_limit_exceeded") == refusal(refused)
        assert "This user has used its 2 requests" in refused.json()["error"]["message"]
        assert 200 == (await ask(safety_identifier="ben")).status_code
        shares = {request.share for request in house.engine.requests[-3:]}
        assert 2 == len(shares) == len({share.partition("\0")[2] for share in shares})
        assert [200, 200, 429] == [(await ask()).status_code for _ in range(3)], "one without"
        overrides["user_requests"] = 0  # divided, without a limit
        assert 200 == (await ask(user_id="anna")).status_code
        assert "\0" in house.engine.requests[-1].share


async def test_a_clock_set_back_locks_nobody_out(monkeypatch):
    now_s = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now_s[0])
    limits = WindowLimits(LimitSettings(tenant=Quota(requests=1)), MemoryStorage())
    now_s[0] += 40 * 86_400
    await limits.admit(ACME)
    with pytest.raises(RateLimited, match="retry in 60 s"):
        await limits.admit(ACME)
    now_s[0] -= 40 * 86_400
    await limits.admit(ACME)
    with pytest.raises(RateLimited, match="retry in 60 s"):
        await limits.admit(ACME)
    now_s[0] -= 30
    await limits.admit(ACME)


async def test_hits_do_not_count_against_miss_tokens():
    house = limited(miss_tokens=PROMPT_TOKENS + 1)
    async with running(house) as (_, client):
        house.engine.script = Script(answer="x", hits={"hit_device": PROMPT_TOKENS - 1})
        for _ in range(5):  # five misses in all
            assert 200 == (await client.post(CHAT, json=HELLO)).status_code
        house.engine.script = Script(answer="x")
        assert 200 == (await client.post(CHAT, json=HELLO)).status_code
        refused = await client.post(CHAT, json=HELLO)
        assert 429 == refused.status_code
        assert "cache-miss tokens" in refused.json()["error"]["message"]


async def test_output_tokens_run_out():
    house = limited(output_tokens=5)
    house.engine.script = Script(answer="12345")
    async with running(house) as (_, client):
        assert 200 == (await client.post(CHAT, json=HELLO)).status_code
        assert 429 == (await client.post(CHAT, json=HELLO)).status_code


async def test_concurrency_is_given_back_on_every_way_out():
    house = limited(concurrency=2)
    house.engine.script = Script(answer="abc", step_s=0.01)
    async with running(house) as (_, client):
        answers = await asyncio.gather(*(client.post(CHAT, json=HELLO) for _ in range(5)))
        assert [200, 200, 429, 429, 429] == sorted(answer.status_code for answer in answers)
        for script in (Script(fail_after=0), Script(refuse=ZeroDivisionError())):
            house.engine.script = script
            for _ in range(3):
                assert 500 == (await client.post(CHAT, json=HELLO)).status_code
        house.engine.script = Script(answer="abc")
        assert 200 == (await client.post(CHAT, json=HELLO)).status_code


async def test_a_refused_request_takes_no_place():
    limits = WindowLimits(LimitSettings(tenant=Quota(requests=1, concurrency=2)), MemoryStorage())
    await (await limits.admit(ACME)).close(EMPTY)
    for _ in range(4):
        with pytest.raises(RateLimited, match="1 requests of this minute"):
            await limits.admit(ACME)


async def test_keys_and_tenants_have_their_own_quotas():
    settings = LimitSettings(
        key=Quota(requests=1), tenant=Quota(requests=3), tenants={"vip": Quota()}
    )
    limits = WindowLimits(settings, MemoryStorage())
    await limits.admit(ACME)
    with pytest.raises(RateLimited, match="key"):
        await limits.admit(ACME)
    await limits.admit(Principal("acme", key_id="key_2"))
    await limits.admit(Principal("acme", key_id="key_3"))
    with pytest.raises(RateLimited, match="tenant"):
        await limits.admit(Principal("acme", key_id="key_4"))
    for number in range(5):
        await limits.admit(Principal("vip", key_id=f"vip_{number}"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_request_that_would_wait_too_long_gets_retry_after(path):
    """Before the body is read: what is refused costs next to nothing. Other tenants are served."""
    house = fake_house(gatekeeper=GateOf(*["storm", "storm", "polite"]))
    async with running(house) as (_, client):
        for wait_s, retry_s in ((12.5, "3"), (500.0, "60")):
            house.engine.script = Script(wait_s={"storm": wait_s})
            refused = await client.post(path, content=b"not even JSON")
            assert (503, "queue_too_long") == refusal(refused)
            assert retry_s == refused.headers["retry-after"]
            assert f"wait about {wait_s:.0f} s" in refused.json()["error"]["message"]
        body = HELLO if path == CHAT else {"model": "bytes", "prompt": "hi"}
        assert 200 == (await client.post(path, json=body)).status_code
        assert ["polite"] == [request.share for request in house.engine.requests]


async def test_the_prompts_own_length_counts_and_nothing_is_held_for_a_refused_one():
    house = fake_house()
    house.engine.predicted_wait_s = lambda share, num_tokens: float(num_tokens)
    async with running(house) as (_, client):
        assert 503 == (await client.post(CHAT, json=HELLO)).status_code
        short = {"model": "bytes", "prompt": "x" * 9}
        assert 200 == (await client.post("/v1/completions", json=short)).status_code
    assert 1 == len(house.meter.charges)


async def test_one_tenant_leaves_places_in_the_engine_to_others():
    house = fake_house(
        gatekeeper=GateOf(*["storm"] * 12 + ["polite"] + ["storm"] * 6), max_in_flight=8
    )
    house.engine.script = Script(stall=True)
    async with running(house) as (app, client):
        visits = [Visit(app, CHAT, HELLO).start() for _ in range(12)]
        await begun(house, requests=6)
        done = [visit.messages[0]["status"] for visit in visits if visit.messages]
        assert [503] * 6 == done
        house.engine.script = Script(answer="x")
        assert 200 == (await client.post(CHAT, json=HELLO)).status_code
        for visit in visits:
            visit.leave()
        await asyncio.gather(*(visit.task for visit in visits))
        several = {"model": "bytes", "prompt": ["a", "b", "c"]}
        for _ in range(6):  # every place came back
            assert 200 == (await client.post("/v1/completions", json=several)).status_code


async def test_a_store_that_fails_is_asked_again_after_a_while():
    class Failing(MemoryStorage):
        num_asked = 0

        async def get(self, key: str) -> int:
            self.num_asked += 1
            raise StorageError(OSError("redis is gone"))

    storage, now_s = Failing(), 0.0
    breaker = CircuitBreaker(clock_s=lambda: now_s)
    limits = WindowLimits(LimitSettings(tenant=Quota(requests=1)), storage, breaker=breaker)
    for asked, now_s in ((1, 0.0), (1, 2.9), (2, 3.0), (2, 5.9), (3, 6.0)):
        await (await limits.admit(ACME)).close(EMPTY)
        assert asked == storage.num_asked, f"at {now_s} s"


async def test_only_a_client_out_of_misses_is_told_that_hits_do_not_count():
    for quota, told in ((Quota(requests=1), False), (Quota(miss_tokens=1), True)):
        limits = WindowLimits(LimitSettings(tenant=quota), MemoryStorage())
        await (await limits.admit(ACME)).close(Usage(miss=1))
        with pytest.raises(RateLimited) as refused:
            await limits.admit(ACME)
        assert told is ("served from the cache do not count" in str(refused.value))
