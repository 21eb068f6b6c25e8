"""Hours of pins are charged once each: over restarts, crashes, ends, and empty balances."""

import random
from concurrent.futures import Future

import pytest

from billing.prices.book import NS
from billing.prices.cards import parse_card
from billing.proof.audit import verify
from billing.store.reports import daily, stream_entries
from cachesvc.operator.operator import CacheOperator
from cachesvc.operator.scopes import Payer
from cachesvc.operator.storage_meter import HOUR_S, StorageMeter, spans_begun
from tests.support.admin import RecordingTrail
from tests.support.billing import ManualClock, running_ledger
from tests.support.caches import cache_of
from tests.support.chain_runner import chain_layout
from tests.support.memory_tier import MemoryTier, SteppedMover
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.disk.pin_file import load_pins
from tiers.operations.pins import MAX_CACHES
from tiers.policy.retention import PinError

BLOCK = 4
LAYOUT = chain_layout(BLOCK)
ROOT = CacheScope(tenant=b"acme").root()
GROUP = CacheScope(tenant=b"group").root()
RATE = 1_000_000  # units for a token-hour: 1 CNY per million
PRICED = """
[card]
name = "stored"
version = "1"
valid_from = "2024-12-31T00:00:00Z"
currency = "CNY"
[[model]]
match = "*"
hit = "0.1"
miss = "1"
output = "2"
storage = "1"
"""


class Life:
    """One life of a server over a folder: a cache with pins, a meter, and the operator of both."""

    def __init__(self, folder, money):
        self.clock, self.trail = money.clock, RecordingTrail()
        tier = MemoryTier(64, block_bytes=LAYOUT.nbytes)
        self.mover = SteppedMover(tier)
        parts = {"disk": tier, "mover": self.mover, "pin_folder": folder}
        self.tiers = cache_of(LAYOUT, 8, 64, **parts, wall_clock=self.now_s)
        self.meter = StorageMeter(
            self.call,
            money.ledger,
            lambda: {ROOT: Payer("acme", "model")},
            self.trail,
            pins=load_pins(folder),
            clock=self.now_s,
        )
        signer = None
        self.hands = CacheOperator(
            self.call, self.call, BLOCK, folder, signer, self.meter, self.now_s
        )

    def now_s(self):
        return self.clock() / NS

    def call(self, function):
        future = Future()
        future.set_result(function(self.tiers.operations))
        self.mover.run(100)
        return future

    async def pin(self, name, num_blocks, hours, scope=ROOT):
        prefix = Chain(scope, range(num_blocks * BLOCK), BLOCK)
        return await self.hands.pin(name, prefix, self.now_s() + hours * HOUR_S, "hot")

    async def wait(self, seconds):
        """Time passes; the cache ends pins whose time is over, the meter looks."""
        self.clock.advance(seconds)
        self.call(lambda _: self.tiers.step())
        await self.meter.settle()

    def names(self):
        return sorted(pin.name for pin in self.tiers.operations.pins())


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/ledger.db"


def apply(money, text=PRICED):
    money.accounts.apply_card(parse_card(text), by="test")


def charges(money):
    """Units by request id, with their corrections; the ledger proves."""
    proof = verify(money.ledger.store)
    assert proof.ok, proof.problems
    with money.ledger.store.reading() as connection:
        entries = list(stream_entries(connection, "acme"))
    sums = {}
    for entry in entries:
        if entry.request_id.removeprefix("late:").startswith("pin:"):
            name = entry.request_id.removeprefix("late:")
            sums[name] = sums.get(name, 0) + entry.amounts.get("revenue", 0)
    return sums


def total(pins):
    """What started hours until a moment come to."""
    return sum(pin.num_tokens * spans_begun(pin, end_s, HOUR_S) * RATE for pin, end_s in pins)


async def test_each_started_hour_is_charged_when_it_begins(tmp_path, url):
    with running_ledger(url) as money:
        apply(money)
        money.fund(10**12)
        life = Life(tmp_path, money)
        pin = await life.pin("system", 3, hours=2.5)
        assert [12 * RATE] == list(charges(money).values())
        for seconds, hours in ((3599, 1), (1, 2), (3600, 3), (1800, 3), (7200, 3)):
            await life.wait(seconds)
            assert [12 * RATE] * hours == list(charges(money).values())
        assert life.names() == [] and len(charges(money)) == 3
        with money.ledger.store.reading() as connection:
            (day,) = daily(connection, "acme")
        assert (0, 3 * 12) == (day["requests"], day["storage_token_hours"])
        first = next(iter(charges(money)))
        assert first == f"pin:system:{round(pin.since_s * 1000)}:0"


BY_MINUTE = PRICED.replace('storage = "1"', 'storage_minute = "1"')


async def test_each_started_minute_is_charged_where_the_card_says_so(tmp_path, url):
    with running_ledger(url) as money:
        apply(money, BY_MINUTE)
        money.fund(10**12)
        life = Life(tmp_path, money)
        pin = await life.pin("system", 3, hours=2)
        await life.wait(59)
        assert [12 * RATE] == list(charges(money).values())
        await life.wait(1)
        name = f"pin:system:{round(pin.since_s * 1000)}"
        assert [f"{name}:0.00", f"{name}:0.01"] == list(charges(money))
        await life.wait(61 * 60)  # nobody looked for an hour
        assert [12 * RATE] * 63 == list(charges(money).values())
        assert f"{name}:1.02" in charges(money)
        again = Life(tmp_path, money)  # after a restart
        await again.wait(30)
        assert 63 == len(charges(money))
        await again.hands.unpin("system")
        await again.wait(3600)
        assert 63 == len(charges(money))
        with money.ledger.store.reading() as connection:
            (day,) = daily(connection, "acme")
        assert (0, 63 * 12) == (day["requests"], day["storage_token_minutes"])


async def test_a_tenant_causes_one_entry_a_minute_for_each_of_64_caches(tmp_path, url):
    """And one for each that it makes anew, which is a request of its own."""
    with running_ledger(url) as money:
        apply(money, BY_MINUTE)
        money.fund(10**12)
        life = Life(tmp_path, money)

        async def make(name):
            ends_s = life.now_s() + 2 * HOUR_S
            await life.hands.pin(name, Chain(ROOT, range(BLOCK), BLOCK), ends_s, "", owner="acme")

        for number in range(MAX_CACHES):
            await make(f"c{number}")
        with pytest.raises(PinError, match="64 caches, as many as are kept"):
            await make("one more")
        assert MAX_CACHES == len(charges(money))
        await life.wait(60)
        assert 2 * MAX_CACHES == len(charges(money))
        life.clock.advance(1)
        await life.hands.unpin("c0")
        await make("c0")
        assert 2 * MAX_CACHES + 1 == len(charges(money))
        await life.wait(60)
        assert 3 * MAX_CACHES + 1 == len(charges(money))


@pytest.mark.parametrize(("first", "then"), [(PRICED, BY_MINUTE), (BY_MINUTE, PRICED)])
async def test_a_pin_changes_between_hours_and_minutes_as_an_hour_begins(
    tmp_path, url, first, then
):
    """The new card begins within the first hour; what it sells begins with the second."""
    with running_ledger(url) as money:
        apply(money, first)
        money.fund(10**12)
        life = Life(tmp_path, money)
        await life.pin("system", 3, hours=3)
        new = then.replace('"1"', '"2"', 1).replace("2024-12-31T00:00:00Z", "2025-01-01T00:10:00Z")
        apply(money, new)
        for _ in range(70):
            await life.wait(60)
        spans = 1 + 11 if first is PRICED else 10 + 1
        assert spans == len(charges(money))
        assert {12 * RATE} == set(charges(money).values())


async def test_a_groups_pin_is_charged_to_no_tenant(tmp_path, url):
    with running_ledger(url) as money:
        apply(money)
        life = Life(tmp_path, money)
        await life.pin("shared", 3, hours=9, scope=GROUP)
        await life.wait(2 * HOUR_S)
        assert charges(money) == {} and life.names() == ["shared"]


async def test_a_pin_that_the_balance_does_not_cover_is_released_and_audited(tmp_path, url):
    with running_ledger(url) as money:
        apply(money)
        money.accounts.set_credit_limit("acme", 0, by="test")
        money.fund(2 * 12 * RATE)
        life = Life(tmp_path, money)
        await life.pin("system", 3, hours=9)
        await life.wait(HOUR_S)
        assert life.names() == ["system"]
        await life.wait(HOUR_S)
        assert life.names() == [] and load_pins(tmp_path) == []
        assert len(charges(money)) == 2 and money.accounts.tenant("acme").balance == 0
        assert [("cache.unpin", "system")] == life.trail.actions
        assert "covers no more" in life.trail.entries[0]["reason"]
        with pytest.raises(PinError, match="does not cover"):
            await life.pin("again", 3, hours=9)
        assert life.names() == []


async def test_hours_while_the_server_was_down_are_owed(tmp_path, url):
    with running_ledger(url) as money:
        apply(money)
        money.accounts.set_credit_limit("acme", 0, by="test")
        money.fund(12 * RATE)
        await Life(tmp_path, money).pin("system", 3, hours=2.5)
        money.clock.advance(4 * HOUR_S)
        life = Life(tmp_path, money)
        await life.meter.settle()
        assert len(charges(money)) == 3
        assert money.accounts.tenant("acme").owed == 2 * 12 * RATE


async def test_a_crash_between_hold_and_charge_loses_no_hour(tmp_path, url):
    clock = ManualClock()
    with running_ledger(url, clock=clock) as money:
        apply(money)
        money.fund(10**12)
        life = Life(tmp_path, money)
        settle = money.ledger.settle
        money.ledger.settle = _die  # type: ignore[method-assign, assignment]
        with pytest.raises(ConnectionError):
            await life.pin("system", 3, hours=2.5)
        money.ledger.settle = settle  # type: ignore[method-assign]
        assert money.accounts.tenant("acme").held == 12 * RATE
    with running_ledger(url, clock=clock) as money:
        assert money.accounts.tenant("acme").held == 0
        for _ in range(2):
            await Life(tmp_path, money).meter.settle()
            assert sum(charges(money).values()) == 12 * RATE


def _die(*_, **__):
    raise ConnectionError("killed")


@pytest.mark.parametrize("seed", range(6))
async def test_the_sum_is_tokens_times_hours_times_rate_whatever_the_restarts(tmp_path, url, seed):
    """Pins come, go, end and are replaced at random; the server is killed and started at random."""
    chance, clock = random.Random(seed), ManualClock()
    ended = []
    for number in range(8):
        with running_ledger(url, clock=clock) as money:
            if not number:
                apply(money)
                money.fund(10**15)
            life = Life(tmp_path, money)
            await life.meter.settle()
            for _ in range(chance.randrange(6)):
                before = {pin.name: pin for pin in life.tiers.operations.pins()}
                name = chance.choice("abc")
                if chance.random() < 0.3:
                    await life.hands.unpin(name)
                elif chance.random() < 0.6:
                    await life.pin(name, chance.randint(1, 4), chance.uniform(0.1, 6))
                after = {(pin.name, pin.since_s): pin for pin in life.tiers.operations.pins()}
                gone = [p for p in before.values() if (p.name, p.since_s) not in after]
                ended += [(pin, life.now_s()) for pin in gone]
                still = list(after.values())
                await life.wait(chance.randrange(3 * HOUR_S))
                left = {(pin.name, pin.since_s) for pin in life.tiers.operations.pins()}
                ended += [(p, p.until_s) for p in still if (p.name, p.since_s) not in left]
            standing = [(pin, life.now_s()) for pin in life.tiers.operations.pins()]
            assert sum(charges(money).values()) == total(ended + standing)
        clock.advance(chance.randrange(4 * HOUR_S))
        still = [pin for pin, _ in standing]
        ended += [(pin, pin.until_s) for pin in still if pin.until_s <= clock() / NS]
    with running_ledger(url, clock=clock) as money:
        for _ in range(2):
            life = Life(tmp_path, money)
            await life.meter.settle()
            standing = [(pin, life.now_s()) for pin in life.tiers.operations.pins()]
            assert sum(charges(money).values()) == total(ended + standing)
