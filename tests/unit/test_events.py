"""The stream of block events: bounded, never in the way, replayed to who comes back."""

import random
import threading
from pathlib import Path

import pytest

from tests.support.faulty_storage import SCOPE, chain, fill, take
from tiers.blocks.frames import FrameArena
from tiers.blocks.keys import PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.disk.open import open_disk
from tiers.disk.tier import DiskTier
from tiers.telemetry.events import BlockEvent, EventKind, EventStream
from tiers.tier import Cause, TierName

LAYOUT = BlockLayout.uniform(
    num_layers=2, block_size=64, num_kv_heads=2, head_dim=8, dtype="float32"
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_795_239_810.0

    def __call__(self) -> float:
        return self.now_s


def publish(stream: EventStream, count: int) -> None:
    """As a publisher does: only where somebody listens."""
    for _ in range(count):
        if stream.listening:
            stream.publish(EventKind.STORED, TierName.DEVICE, key=PrefixKey(b"k" * 16))


def numbers(events: list[BlockEvent]) -> list[int]:
    return [event.number for event in events]


def test_nothing_is_made_while_nobody_listens():
    stream = EventStream()
    publish(stream, 5)
    assert not stream.listening
    assert [] == stream.subscribe().take()


def test_each_subscriber_gets_every_event_in_order():
    stream = EventStream()
    one, two = stream.subscribe(), stream.subscribe()
    publish(stream, 3)
    first = one.take()
    assert [0, 1, 2] == [number - first[0].number for number in numbers(first)]
    assert first == two.take()
    assert [] == one.take()


def test_a_subscriber_that_reads_too_slowly_loses_the_oldest_and_is_told_how_many():
    stream = EventStream()
    slow, quick = stream.subscribe(capacity=4), stream.subscribe()
    publish(stream, 10)
    assert (6, 4) == (slow.missed, len(kept := slow.take()))
    assert numbers(quick.take())[-4:] == numbers(kept)


def test_a_listener_is_woken_once_for_what_it_has_not_taken():
    woken: list[int] = []
    stream = EventStream()
    subscription = stream.subscribe(lambda: woken.append(1))
    publish(stream, 3)
    assert 1 == len(woken)
    subscription.take()
    publish(stream, 1)
    assert 2 == len(woken)


def test_who_comes_back_in_time_gets_what_it_missed():
    stream = EventStream()
    first = stream.subscribe()
    publish(stream, 2)
    last = first.take()[-1].number
    stream.unsubscribe(first)
    publish(stream, 3)
    again = stream.subscribe(after=last)
    assert not again.gap
    assert [last + 1, last + 2, last + 3] == numbers(again.take())


def test_who_comes_back_too_late_is_told_that_events_are_lost():
    clock = Clock()
    stream = EventStream(ring=2, linger_s=60, clock=clock)
    first = stream.subscribe()
    publish(stream, 5)
    assert stream.subscribe(after=numbers(first.take())[0]).gap, "the ring has forgotten some"

    stream = EventStream(linger_s=60, clock=clock)
    first = stream.subscribe()
    publish(stream, 1)
    last = numbers(first.take())[0]
    stream.unsubscribe(first)
    clock.now_s += 61
    publish(stream, 5)
    assert not stream.listening
    assert stream.subscribe(after=last).gap, "events were made while nothing was kept"


def test_nothing_that_happened_is_no_gap_however_late():
    clock = Clock()
    stream = EventStream(linger_s=60, clock=clock)
    first = stream.subscribe()
    publish(stream, 1)
    last = numbers(first.take())[0]
    stream.unsubscribe(first)
    clock.now_s += 3600
    assert not stream.subscribe(after=last).gap


def test_numbers_grow_over_a_restart_and_show_it_as_a_gap():
    clock = Clock()
    before = EventStream(clock=clock)
    heard = before.subscribe()
    publish(before, 100)
    last = numbers(heard.take())[-1]
    clock.now_s += 1
    after = EventStream(clock=clock)
    assert after.subscribe(after=last).gap
    fresh = after.subscribe()
    publish(after, 1)
    assert numbers(fresh.take())[0] > last


def test_publishers_on_many_threads_lose_nothing():
    stream = EventStream()
    subscription = stream.subscribe()
    threads = [threading.Thread(target=publish, args=(stream, 500)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = numbers(subscription.take())
    assert list(range(seen[0], seen[0] + 2000)) == seen


@pytest.fixture
def stream() -> EventStream:
    return EventStream()


@pytest.fixture
def tier(tmp_path: Path, stream: EventStream) -> DiskTier:
    return open_disk(tmp_path / "disk", LAYOUT, 2 << 20, stream=stream)


def held(tier: DiskTier) -> set[PrefixKey]:
    with tier.view() as view:
        return {block.key for block in view.blocks()}


def test_who_applies_the_disks_events_knows_what_it_holds(tier, stream):
    """Stores, evictions for room, discards and a purge, at random."""
    chance = random.Random(7)
    subscription = stream.subscribe()
    known: set[PrefixKey] = set()
    frames = take(FrameArena(LAYOUT, 4), 4)
    stored = []
    for seed in range(60):
        ids = chain(4, block_size=LAYOUT.block_size, seed=seed)
        for frame, block in zip(frames, ids, strict=True):
            fill(frame, block)
        tier.store(ids, frames)
        stored += ids
        if chance.random() < 0.3:
            tier.discard([block.key for block in chance.sample(stored, 3)])
        if seed == 40:
            tier.purge([SCOPE.root()])
        for event in subscription.take():
            assert event.key is not None
            assert event.scope == SCOPE.root()
            (known.discard if event.kind is EventKind.REMOVED else known.add)(event.key)
        assert held(tier) == known
    causes = tier.stats().lives.causes
    assert causes[Cause.ROOM] == tier.stats().evicted > 0
    assert causes[Cause.REQUEST] > 0
    assert tier.stats().lives.lifetime.count == sum(causes.values())
    tier.close()


def test_an_event_of_the_disk_tells_tokens_parent_and_size(tier, stream):
    subscription = stream.subscribe()
    ids = chain(2, block_size=LAYOUT.block_size)
    frames = take(FrameArena(LAYOUT, 2), 2)
    for frame, block in zip(frames, ids, strict=True):
        fill(frame, block)
    tier.store(ids, frames)
    told = {event.key: event for event in subscription.take()}
    event = told[ids[1].key]
    assert (EventKind.MOVED, TierName.DISK, TierName.HOST) == (event.kind, event.tier, event.source)
    assert (ids[0].key, ids[1].tokens, 64) == (event.parent, event.tokens, event.num_tokens)
    assert 0 < event.nbytes <= LAYOUT.nbytes + 4096
    tier.close()
