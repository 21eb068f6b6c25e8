"""The remote tier believes nothing that arrives, waits for nothing long, and shares prefixes."""

import threading
from dataclasses import replace

import pytest

from tests.patience import until
from tests.sim import world as sim
from tests.support.disks import CAPACITY, FRAMES, blocks, load, publish_all
from tests.support.faulty_storage import LAYOUT, chain, fill, put
from tests.support.memory_tier import MemoryTier
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.disk.open import open_disk
from tiers.errors import ConfigurationError, MissReason
from tiers.remote.breaker import FAILURES, Breaker
from tiers.remote.objects import RemoteError, open_objects, shown_url
from tiers.remote.seal import Seal, read_seal
from tiers.remote.settings import RemoteWrites
from tiers.remote.stacked import StackedTier
from tiers.remote.tier import RemoteTier, object_name
from tiers.tier import Loaded, TierName

DISK, REMOTE = TierName.DISK, TierName.REMOTE


class Objects:
    """Bytes in a dict, and what goes wrong on the way to them."""

    num_failed = 0

    def __init__(self):
        self.held = {}
        self.broken = False
        self.num_calls = 0

    def _called(self):
        self.num_calls += 1
        if self.broken:
            raise RemoteError("no answer in 1 s")

    def exists(self, names):
        self._called()
        return [name in self.held for name in names]

    def read(self, names, take):
        self._called()
        for number, name in enumerate(names):
            if name in self.held:
                take(number, memoryview(self.held[name]))

    def put(self, name, data):
        self._called()
        self.held[name] = data

    def delete(self, names):
        self._called()
        return sum(self.held.pop(name, None) is not None for name in names)

    def names(self, start):
        self._called()
        yield from [name for name in self.held if name.startswith(start)]

    def close(self):
        pass


@pytest.fixture
def objects():
    return Objects()


class Servers:
    """Servers with a disk each, above one store."""

    def __init__(self, root, objects):
        self._root = root
        self._objects = objects
        self._opened = []

    def __call__(self, name, writes=RemoteWrites.ALL, *, seal=None, breaker=None):
        disk = open_disk(self._root / name, LAYOUT, CAPACITY)
        before = self._objects.num_calls
        remote = RemoteTier(self._objects, LAYOUT, disk.read_record, seal=seal, breaker=breaker)
        until(lambda: self._objects.num_calls > before)  # as it looks at its store
        self._opened.append(StackedTier(disk, remote, writes))
        return self._opened[-1]

    def close(self):
        for tier in self._opened:
            tier.close()


@pytest.fixture
def server(tmp_path, objects):
    servers = Servers(tmp_path, objects)
    yield servers
    servers.close()


def store(tier, ids):
    assert put(tier, ids, FRAMES) == []
    publish_all(tier.remote)


def test_a_prefix_may_lie_in_parts_on_disk_and_remotely(server, objects):
    one, two = server("one"), server("two")
    store(one, blocks())
    store(two, blocks()[:1])
    store(two, blocks()[2:3])
    assert load(two, blocks()) == Loaded(4, None, (DISK, *(REMOTE,) * 3))
    del objects.held[object_name(blocks()[2].scope, blocks()[2].key)]
    mixed = (DISK, REMOTE, DISK, REMOTE)
    assert load(two, blocks()) == Loaded(4, None, mixed)
    assert load(two, blocks(count=6)) == Loaded(4, MissReason.ABSENT, mixed)


def test_only_what_is_reused_or_pinned_is_sent_and_once_it_is_on_disk(server, objects):
    tier, ids = server("one", RemoteWrites.REUSED), blocks()
    names = [object_name(block.scope, block.key) for block in ids]
    for _ in range(2):
        tier.used([ids[0].key])  # hit above
    publish_all(tier.remote)
    assert not objects.held
    store(tier, ids)
    assert names[:1] == [*objects.held]
    tier.keep([ids[3].key])
    publish_all(tier.remote)
    assert [names[0], names[3]] == [*objects.held]
    load(tier, ids[1:3])
    assert 2 == len(objects.held)
    load(tier, ids[1:3])
    publish_all(tier.remote)
    assert {*names} == {*objects.held}


def test_every_byte_of_a_remote_record_is_guarded(server, objects):
    """One changed bit anywhere is a miss with its reason, counted, and the record is deleted."""
    one, two = server("one"), server("two")
    block = blocks(count=1)
    store(one, block)
    [(name, record)] = objects.held.items()
    num_misses = 0
    for at in [*range(0, 300, 3), *range(300, len(record), 97)]:
        damaged = bytearray(record)
        damaged[at] ^= 1 << at % 8
        objects.held[name] = bytes(damaged)
        loaded = load(two, block)
        if loaded.num_blocks == 0:
            num_misses += 1
            assert loaded.reason is not MissReason.ABSENT
    assert sum(two.remote.stats().faults.values()) == num_misses > 100
    objects.held[name] = b""  # what Redis holds as a list, say
    assert load(two, block).reason is not MissReason.ABSENT and not objects.held


def test_another_blocks_record_is_never_served(server, objects):
    """Of another prompt, another tenant or another layout, under the name that is asked for."""
    one, two = server("one"), server("two")
    stranger = chain(
        1, block_size=16, seed=0, scope=CacheScope(weights=b"tiny", tenant=b"stranger")
    )
    store(one, blocks(seed=5, count=1) + stranger)
    wanted = blocks(count=1)
    name = object_name(wanted[0].scope, wanted[0].key)
    for block in (blocks(seed=5, count=1)[0], stranger[0]):
        objects.held[name] = objects.held[object_name(block.scope, block.key)]
        assert load(two, wanted) == Loaded(0, MissReason.COLLISION)
        assert name not in objects.held, "it would be found, and refused, each time"
        assert 0 == two.probe(wanted)


def test_sealed_records_are_read_with_the_key_only(server, objects):
    """Another key, no key, or a record moved to another name: a miss."""
    key, other = Seal(b"k" * 32), Seal(b"o" * 32)
    one, two = server("one", seal=key), server("two", seal=key)
    store(one, blocks())
    assert load(two, blocks()) == Loaded(4, None, (REMOTE,) * 4)
    held = dict(objects.held)
    assert all(b"cachesvc" not in sealed for sealed in held.values())
    for stranger in (server("three", seal=other), server("four")):
        objects.held = dict(held)
        assert load(stranger, blocks()).num_blocks == 0
    first, second = (object_name(block.scope, block.key) for block in blocks(count=2))
    objects.held = held | {first: held[second]}
    assert load(two, blocks(count=1)) == Loaded(0, MissReason.CHECKSUM)


def test_a_store_that_fails_is_told_left_alone_and_asked_again(
    server, objects, caplog, monkeypatch
):
    """Misses at once while the breaker is open; hits again when the store is back."""
    now, objects.broken = [0.0], True
    breaker = Breaker(lambda: now[0])
    one, two = server("one"), server("two", breaker=breaker)
    until(lambda: 2 == caplog.text.count("no answer in 1 s"))
    objects.broken = False
    store(one, blocks())
    objects.broken = True
    for _ in range(FAILURES):
        assert load(two, blocks()) == Loaded(0, MissReason.IO_ERROR)
    before = objects.num_calls
    assert two.probe(blocks()) == 0
    assert load(two, blocks()) == Loaded(0, MissReason.IO_ERROR)
    assert objects.num_calls == before, "an open breaker asks nobody"
    with monkeypatch.context() as patch:
        told = iter((MissReason.CHECKSUM, MissReason.ABSENT))
        patch.setattr(two.disk, "load", lambda *_: Loaded(0, next(told)))
        assert load(two, blocks()) == Loaded(0, MissReason.CHECKSUM), "the disk's, told first"
    objects.broken = False
    now[0] += 2
    assert load(two, blocks()) == Loaded(4, None, (REMOTE,) * 4)
    assert breaker.num_opened == 1


@pytest.mark.parametrize("evicts", [False, True])
def test_a_slow_publisher_holds_nobody_up_and_leaves_nothing_that_is_evicted(
    server, objects, evicts
):
    tier, keys = server("one"), [block.key for block in blocks()]
    sending, gate, put = threading.Event(), threading.Event(), objects.put

    def slow(name, data):
        sending.set()
        assert gate.wait(20)
        put(name, data)

    objects.put = slow
    for frame, block in zip(FRAMES, blocks(), strict=False):
        fill(frame, block)
    tier.store(blocks(), FRAMES[:4])
    assert sending.wait(20)
    assert load(tier, blocks()) == Loaded(4, None, (DISK,) * 4)
    assert not objects.held
    evicting = threading.Thread(target=tier.discard, args=(keys if evicts else [],))
    evicting.start()
    evicting.join(0.2)
    gate.set()
    evicting.join(20)
    publish_all(tier.remote)
    assert (0 if evicts else 4) == len(objects.held)


def test_all_readers_that_share_a_prefix_are_weighed(server, monkeypatch):
    """Nine blocks are three jobs, of which each reader does one at the rate that is measured."""
    one, two = server("one"), server("two")
    store(one, blocks(count=9))
    monkeypatch.setattr(type(two.disk), "num_readers", 4)
    two.remote.economy.load_bytes_per_s = LAYOUT.nbytes  # a block a second
    for blocks_per_s, nine, four in ((0.9, 9, 4), (2.9, 9, 0), (3.1, 0, 0)):
        two.remote.economy.prefill_tokens_per_s = blocks_per_s * LAYOUT.block_size
        assert [nine, four] == [two.probe(blocks(count=count)) for count in (9, 4)]
        assert [nine, four] == [len(two.places(blocks(count=count))[0]) for count in (9, 4)]


def test_a_url_or_key_that_cannot_work_is_refused(tmp_path):
    for url, told in {
        "memcached://somewhere": "use redis://",
        "//me:geheim@host:6379": "no remote tier uses 'host:6379'",
        "redis://host/0?tiemout=3": "redis://host/0 cannot be used: .*'tiemout'",
        "redis+cluster://one:7000,two:7000/0?tiemout=3": "'tiemout'",
        "redis://me:geheim@host/one": "redis://host/one cannot be used: .*'one'",
        "redis+cluster://host:port": "'port'",
        **dict.fromkeys(("redis://:g/heim@host/0", "rediss+cluster://:g#heim@a:1,b:2"), "as %2F"),
        "s3://bucket?rgion=mars": "s3://bucket cannot be used: .*aws_rgion",
    }.items():
        with pytest.raises(ConfigurationError, match=told) as found:
            open_objects(url, 1.0)
        assert "heim" not in str(found.value)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_seal(tmp_path / "none")
    (tmp_path / "key").write_text("abcd")
    with pytest.raises(ConfigurationError, match="has 2 bytes, not 32"):
        read_seal(tmp_path / "key")
    assert shown_url("redis://:secret@host:1/0") == "redis://host:1/0"


def test_a_step_asks_no_store_why_a_prompt_is_cold_and_a_slow_store_is_told(monkeypatch):
    """It may take a second to answer. Readers ask it, who run between the turns here."""
    objects = Objects()

    def stacked(*sizes, **more):
        disk = MemoryTier(*sizes, **more)
        return StackedTier(disk, RemoteTier(objects, LAYOUT, disk), RemoteWrites.ALL)

    monkeypatch.setattr(sim, "MemoryTier", stacked)
    world = sim.World()
    admission = world.engine._scheduler._admission
    monkeypatch.setattr(
        admission, "_settings", replace(admission._settings, other_arithmetics=(b"another",))
    )
    world.submit("cold", range(20))
    until(lambda: objects.num_calls)
    while world.live():
        before = objects.num_calls
        world.turn()
        assert before == objects.num_calls
        world.mover.read()
    assert objects.num_calls > 1
    prompt = Chain(CacheScope().root(), range(20, 40), sim.BLOCK)
    objects.held = {object_name(prompt.root, key): b"" for key in prompt.keys}
    monkeypatch.setattr(RemoteTier, "pays", lambda _, num_blocks, __: not num_blocks)
    world.ask("slow", range(20, 40))
    reasons = world.outputs["slow"][0].miss_reasons
    assert {MissReason.SLOWER_THAN_COMPUTE: 16, MissReason.TAIL: 4} == reasons
    assert 1 == world.cache.stats().loads_refused
    world.tier.close()
