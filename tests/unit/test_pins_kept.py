"""Pins in the cache: kept in at least one tier, bounded, over restarts, and let go in time. A
prefix is published once everything that the shared tier takes of it is written."""

from array import array

import pytest

from tests.support.caches import cache_of
from tests.support.chain_runner import chain_layout
from tests.support.disks import Clock
from tests.support.memory_tier import MemoryTier, SteppedMover
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.disk.open import open_disk
from tiers.disk.pin_file import PINS_NAME, load_pins, save_pins
from tiers.memory.block import Below
from tiers.policy.admission import WritePolicy
from tiers.policy.retention import Pin, PinError, PinKind
from tiers.steady_clock import SteadyClock
from tiers.tier import TierName
from tiers.transfer.ticket import Progress

BLOCK = 4
LAYOUT = chain_layout(BLOCK)
ROOT = CacheScope(tenant=b"acme").root()


class Bench:
    """A cache over a disk in memory, whose sequences are computed by saying so."""

    def __init__(
        self, *, device=12, host=16, disk=60, folder=None, tier=None, clock=None, **settings
    ):
        self.clock = clock or Clock()
        self.tier = tier or MemoryTier(disk, block_bytes=LAYOUT.nbytes)
        self.mover = SteppedMover(self.tier, fail_rate=0.0)
        below = {"disk": self.tier, "mover": self.mover} if disk else {}
        parts = {"pin_folder": folder, "wall_clock": self.clock} | below
        self.cache = cache_of(LAYOUT, device, host, **parts, **settings)
        self.operations = self.cache.operations

    def chain(self, first, num_blocks, root=ROOT):
        return Chain(root, array("i", range(first, first + num_blocks * BLOCK)), BLOCK)

    def serve(self, chain):
        """Run a request over the chain; how many of its blocks were hits."""
        hits = self.compute(chain)
        self.settle()
        return hits

    def compute(self, chain):
        """The same, with no time for the writer."""
        ticket = self.cache.open(chain)
        while self.cache.advance(ticket) is not Progress.READY:
            self.mover.read()
            self.cache.step()
        hits = len(ticket.blocks)
        blocks = [*ticket.blocks, *self.cache.tables.plan(chain, hits)]
        for number in range(hits, len(blocks)):
            self.cache.tables.provide(blocks[number])
            blocks[number] = self.cache.tables.commit(chain, number, blocks[number])
        ticket.blocks.clear()
        self.cache.tables.release(chain, blocks, chain.num_tokens)
        return hits

    def scan(self, num_blocks, first=10_000):
        for start in range(0, num_blocks, 4):
            self.serve(self.chain(first + start * BLOCK, 4))

    def settle(self, seconds=0.1):
        """Let a little time pass and everything under way end."""
        self.clock.now_s += seconds
        for _ in range(4):
            self.mover.run(1000)
            self.cache.step()

    def stands(self, chain):
        """Whether each block is in any tier."""
        below = self.tier.held(chain.keys)
        return [
            held or self.cache.index.get(key) is not None
            for key, held in zip(chain.keys, below, strict=True)
        ]


def test_a_pin_that_a_smaller_tier_has_no_room_for_does_not_stop_the_start(tmp_path):
    bench = Bench(folder=tmp_path)
    for name, first in (("small", 0), ("large", 500)):
        bench.operations.pin(name, bench.chain(first, 6), bench.clock.now_s + 3600)
    bench.settle()
    assert ["small", "large"] == [pin.name for pin in load_pins(tmp_path)]
    assert ["small"] == [pin.name for pin in Bench(folder=tmp_path, disk=40).operations.pins()]


def test_a_pin_that_is_renewed_has_been_there_since_it_was_first_set():
    bench = Bench()
    first = bench.operations.pin("system", bench.chain(0, 4), bench.clock.now_s + 100)
    bench.settle(50)
    renewed = bench.operations.pin("system", bench.chain(0, 4), bench.clock.now_s + 100)
    assert first.since_s == renewed.since_s < renewed.until_s - 100
    changed = bench.operations.pin("system", bench.chain(0, 5), bench.clock.now_s + 100)
    assert bench.clock.now_s == changed.since_s


def test_a_pin_does_not_hold_a_block_that_was_never_filled():
    """Its first rows may be reused, and leave like others."""
    bench = Bench()
    chain = bench.chain(0, 3)
    blocks = bench.cache.tables.plan(chain, 0)
    bench.cache.tables.provide(blocks[0])
    bench.operations.pin("system", chain, bench.clock.now_s + 3600)
    bench.cache.tables.release(chain, blocks, BLOCK // 2)
    assert 1 == bench.cache.index.num_partials
    bench.cache.residency.check()


def test_what_is_pinned_is_written_at_once():
    """Not with the next look of each second."""
    bench = Bench()
    for first in (0, 500):
        bench.serve(bench.chain(first, 4))
    for name, first in (("a", 0), ("b", 500)):
        pinned = bench.chain(first, 4)
        bench.operations.pin(name, pinned, bench.clock.now_s + 3600)
        bench.settle()
        assert [True] * 4 == bench.tier.held(pinned.keys)
    later = bench.chain(900, 4)  # computed under its pin
    bench.operations.pin("c", later, bench.clock.now_s + 3600)
    bench.serve(later)
    assert [True] * 4 == bench.tier.held(later.keys)


def test_what_the_disk_refuses_is_offered_to_it_once_a_second():
    bench = Bench()
    pinned = bench.chain(0, 6)
    bench.serve(pinned)
    bench.tier.fault_rate = 1.0
    bench.operations.pin("system", pinned, bench.clock.now_s + 3600)
    bench.settle()
    stores = []
    submit = bench.mover.submit
    bench.mover.submit = lambda job: stores.append(job) or submit(job)
    for _ in range(100):
        bench.settle(0.05)
    assert 4 <= len(stores) <= 6
    bench.tier.fault_rate = 0.0
    bench.settle(1)
    bench.settle(1)
    assert [True] * 6 == bench.tier.held(pinned.keys)


def test_pins_may_not_fill_the_device():
    """A request that needs every block of the device gets it, and the pin is served from below."""
    bench = Bench(device=8)
    pinned = bench.chain(0, 6)
    bench.serve(pinned)
    bench.operations.pin("system", pinned, bench.clock.now_s + 3600)
    bench.serve(bench.chain(900, 8))
    assert all(bench.stands(pinned))
    assert bench.serve(pinned) == 6


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("expires", [False, True])
def test_a_pin_that_ends_lets_its_blocks_go(session, expires):
    bench = Bench(disk=0, host=60) if session else Bench()
    pinned = bench.chain(0, 6)
    bench.serve(pinned)
    if session:
        retain(bench, pinned, "p")
    else:
        bench.operations.pin("p", pinned, bench.clock.now_s + 60)
    bench.scan(100)
    assert all(bench.stands(pinned))
    if expires:
        bench.settle(61)
    else:
        assert bench.operations.unpin("p")
        assert not bench.operations.unpin("p")
    assert bench.operations.pins() == []
    bench.scan(400)
    assert not any(bench.stands(pinned))
    bench.cache.residency.check()


def test_pins_hold_after_a_restart(tmp_path):
    bench = Bench(folder=tmp_path)
    pinned = bench.chain(0, 6)
    bench.serve(pinned)
    pin = bench.operations.pin("system", pinned, bench.clock.now_s + 3600, "the house's prompt")
    bench.mover.run(10)
    assert bench.operations.saved().result(0) is None
    bench.settle()
    bench.tier.keep([])  # a new process has heard of none
    again = Bench(folder=tmp_path, tier=bench.tier)
    assert again.operations.pins() == [pin]
    again.scan(400)
    assert again.serve(pinned) == 6


def test_a_pin_that_ended_while_the_server_was_down_is_gone(tmp_path):
    bench = Bench(folder=tmp_path)
    pin = bench.operations.pin("system", bench.chain(0, 2), bench.clock.now_s + 10)
    save_pins(tmp_path, [pin])
    late = Bench(folder=tmp_path)
    assert late.operations.pins() == [pin]
    late.settle(11)
    assert late.operations.pins() == []
    later = Clock()
    later.now_s += 11
    assert Bench(folder=tmp_path, clock=later).operations.pins() == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": 9, "pins": []}'])
def test_a_damaged_file_of_pins_is_kept_beside_the_next_and_said_once(tmp_path, caplog, damage):
    (tmp_path / PINS_NAME).write_bytes(damage)
    disk = open_disk(tmp_path, LAYOUT, 4 << 20)
    try:
        assert [] == load_pins(tmp_path)
        save_pins(tmp_path, [Pin(name="p", keys=(PrefixKey(b"k" * 16),), until_s=9e9)])
    finally:
        disk.close()
    assert damage == (tmp_path / "pins.json.damaged").read_bytes()
    assert ["p"] == [pin.name for pin in load_pins(tmp_path)]
    said = [message for message in caplog.messages if "cannot be read" in message]
    assert 1 == len(said)
    assert said[0].endswith("kept as pins.json.damaged")


def retain(bench, chain, name, owner="a", kind=PinKind.SESSION):
    return bench.operations.retain(name, chain, bench.clock.now_s + 60, owner=owner, kind=kind)


def test_of_pinned_blocks_the_tail_leaves_before_the_head():
    """While they are pinned, and when they are let go; a tail without its head hits nothing."""
    bench = Bench(disk=0, host=60)
    for num_blocks in (3, 6):  # the second turn's blocks are newer, and still leave first
        bench.serve(bench.chain(0, num_blocks))
        retain(bench, bench.chain(0, num_blocks), "s")
    device = bench.cache.residency.device
    assert [5, 4, 3, 2, 1, 0] == [block.depth for block in device._pinned]
    bench.operations.unpin("s")
    assert [5, 4, 3, 2, 1, 0] == [block.depth for block in device.policy.coldest(6)]


def test_a_turn_takes_the_place_of_the_turn_before():
    bench = Bench()
    assert 3 == retain(bench, bench.chain(0, 3), "t1", kind=PinKind.BREAKPOINT)
    assert 6 == retain(bench, bench.chain(0, 6), "t2", kind=PinKind.BREAKPOINT)
    assert ["t2"] == [pin.name for pin in bench.operations.pins()]
    assert 4 == retain(bench, bench.chain(900, 4), "other", "b")
    assert ["t2", "other"] == [pin.name for pin in bench.operations.pins()]


def test_what_is_pinned_in_passing_gives_way_to_its_owner_and_to_operators(tmp_path):
    """The pin that ends soonest goes first, and no tenant's pin displaces another's."""
    bench = Bench(folder=tmp_path)  # 15 may be pinned
    for number in range(20):
        assert 2 == retain(bench, bench.chain(number * 100, 2), f"s{number}")
        bench.clock.now_s += 1
    standing = [pin.name for pin in bench.operations.pins()]
    assert standing == ["s17", "s18", "s19"]
    late = bench.clock.now_s + 3600
    bench.operations.pin("a:mine", bench.chain(5000, 6), late, owner="a")
    assert "a:mine" in [pin.name for pin in bench.operations.pins()]
    assert 3 == retain(bench, bench.chain(7000, 6), "sb", "b")  # as much as it may
    with pytest.raises(PinError):
        bench.operations.pin("b:mine", bench.chain(8000, 8), late, owner="b")
    assert "sb" in [pin.name for pin in bench.operations.pins()]  # refused, and nothing is lost
    bench.operations.pin("house", bench.chain(9000, 9), late)
    assert ["a:mine", "house"] == [pin.name for pin in bench.operations.pins()]
    bench.cache.residency.check()


def test_a_tenant_has_so_many_pins_and_no_more():
    bench = Bench(disk=4000)
    for number in range(300):
        retain(bench, bench.chain(number * 100, 1), f"s{number}")
    assert 256 == len(bench.operations.pins())
    late = bench.clock.now_s + 3600
    for number in range(64):
        bench.operations.pin(f"a:{number}", bench.chain(number * 100, 1), late, owner="a")
    with pytest.raises(PinError, match="has 64 caches"):
        bench.operations.pin("a:64", bench.chain(6400, 1), late, owner="a")
    bench.operations.pin("a:63", bench.chain(6400, 1), late, owner="a")  # replaces one


def test_breakpoints_are_saved_and_sessions_are_not(tmp_path):
    bench = Bench(folder=tmp_path)
    retain(bench, bench.chain(0, 3), "s")
    retain(bench, bench.chain(500, 3), "b", kind=PinKind.BREAKPOINT)
    bench.settle(2)
    saved = [(pin.name, pin.owner, pin.kind) for pin in load_pins(tmp_path)]
    assert saved == [("b", "a", PinKind.BREAKPOINT)]
    assert ["b"] == [pin.name for pin in Bench(folder=tmp_path).operations.pins()]


def test_a_clock_that_is_set_ends_no_pin_and_makes_none_longer(tmp_path):
    wall, passed = [1_000_000.0], [0.0]
    clock = SteadyClock(lambda: wall[0], lambda: passed[0])
    wall[0] += 400 * 86_400
    assert clock() == 1_000_000.0
    passed[0] += 5
    assert clock() == 1_000_005.0
    # Over a restart there is the wall clock alone. Set back a year, the pin lasts its hour.
    bench = Bench(folder=tmp_path)
    save_pins(tmp_path, [bench.operations.pin("p", bench.chain(0, 2), bench.clock.now_s + 3600)])
    earlier = Clock()
    earlier.now_s -= 365 * 86_400
    again = Bench(folder=tmp_path, clock=earlier)
    assert [earlier.now_s + 3600] == [pin.until_s for pin in again.operations.pins()]


def test_a_pin_that_cannot_be_set_is_explained():
    bench = Bench()
    late = bench.clock.now_s + 10
    with pytest.raises(PinError, match="16 pinned blocks, and 15 may be"):
        bench.operations.pin("much", bench.chain(0, 16), late)
    with pytest.raises(PinError, match="shorter than one block"):
        bench.operations.pin("none", bench.chain(0, 0), late)
    with pytest.raises(PinError, match="end in the past"):
        bench.operations.pin("past", bench.chain(0, 2), bench.clock.now_s)
    with pytest.raises(PinError, match=r"set cache\.host_bytes"):
        cache_of(LAYOUT, 8).operations.pin("p", bench.chain(0, 1), 9e12)


def test_a_prefix_is_found_by_its_last_block_in_memory_and_on_disk():
    bench = Bench()
    chain = bench.chain(0, 6)
    bench.serve(chain)
    assert bench.operations.prefix_of(chain.keys[3]).result(0) == (ROOT, chain.keys[:4])
    bench.scan(40)
    assert bench.cache.index.get(chain.keys[0]) is None
    later = bench.operations.prefix_of(chain.keys[5])
    bench.mover.run(10)
    assert later.result(0) == (ROOT, chain.keys)
    missing = bench.operations.prefix_of(PrefixKey(b"?" * 16))
    bench.mover.run(10)
    assert missing.result(0)[1] == []


def test_evict_takes_blocks_that_are_just_being_written():
    bench = Bench(write_policy=WritePolicy.WRITE_THROUGH)
    chain = bench.chain(0, 3)
    bench.compute(chain)
    bench.cache.step()  # hands them to the writer
    assert {Below.WRITING} == {block.below for block in bench.cache.index.match(chain)}
    told = bench.operations.evict(chain.keys)
    assert [] == list(bench.cache.index.match(chain)), "nobody finds them from now on"
    bench.operations.check()
    bench.settle()
    assert {TierName.DEVICE: 3, TierName.HOST: 3, TierName.DISK: 3} == told.result(0)
    assert [False] * 3 == bench.stands(chain)
    assert 0 == bench.cache.residency.host.num_blocks and not bench.cache.is_moving
    bench.operations.check()


class SharedTier(MemoryTier):
    """One from which other machines could load, if it took anything."""

    is_shared = True


def test_a_block_that_the_shared_tier_refused_is_not_waited_for():
    tier = SharedTier(60, block_bytes=LAYOUT.nbytes)
    bench = Bench(tier=tier)
    tier.fault_rate = 1.0
    prompt = bench.chain(0, 4)
    bench.serve(prompt)
    assert bench.operations.publish(prompt) is None, "they are to be written first"
    bench.settle()
    published = bench.operations.publish(prompt)
    assert published is not None and 0 == published.result(1)
