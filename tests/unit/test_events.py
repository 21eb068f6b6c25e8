"""The stream of block events: bounded, and never in the way."""

import random
from functools import partial

import pytest

from tests.support.disks import CAPACITY, blocks, closed_later, store
from tests.support.faulty_storage import LAYOUT, SCOPE
from tests.support.threads import beside
from tiers.disk.open import open_disk
from tiers.telemetry.events import EventKind, EventStream
from tiers.tier import Cause, TierName


def publish(stream, count):
    """As a publisher does: only where somebody listens."""
    for number in range(count):
        if stream.listening:
            stream.publish(EventKind.STORED, TierName.DEVICE, nbytes=number)


def numbers(events):
    return [event.nbytes for event in events]


def test_nothing_is_made_while_nobody_listens():
    stream = EventStream()
    publish(stream, 5)
    assert not stream.listening
    heard = stream.subscribe()
    assert [] == heard.take()
    stream.unsubscribe(heard)
    assert not stream.listening


def test_a_subscriber_that_reads_too_slowly_loses_the_oldest_and_is_told_how_many():
    stream = EventStream()
    slow, quick = stream.subscribe(capacity=4), stream.subscribe()
    publish(stream, 10)
    assert (6, 4) == (slow.missed, len(kept := slow.take()))
    assert numbers(quick.take())[-4:] == numbers(kept)


def test_a_listener_is_woken_once_for_what_it_has_not_taken():
    woken = []
    stream = EventStream()
    subscription = stream.subscribe(lambda: woken.append(1))
    publish(stream, 3)
    assert 1 == len(woken)
    subscription.take()
    publish(stream, 1)
    assert 2 == len(woken)


def test_publishers_on_many_threads_lose_nothing():
    stream = EventStream()
    one, two = stream.subscribe(), stream.subscribe()
    with beside(*[partial(publish, stream, 500)] * 4):
        pass
    seen = numbers(one.take())
    assert sorted([*range(500)] * 4) == sorted(seen)
    assert seen == numbers(two.take()), "the order is one for all"
    assert [] == one.take()


@pytest.fixture
def stream():
    return EventStream()


@pytest.fixture
def tier(tmp_path, stream):
    return closed_later(open_disk(tmp_path / "disk", LAYOUT, CAPACITY, stream=stream))


def held(tier):
    with tier.view() as view:
        return {block.key for block in view.blocks()}


def test_who_applies_the_disks_events_knows_what_it_holds(tier, stream):
    """Stores, evictions for room, discards and a purge, at random."""
    chance = random.Random(7)
    subscription = stream.subscribe()
    known = set()
    stored = []
    for seed in range(100):
        ids = blocks(seed)
        store(tier, ids)
        stored += ids
        if chance.random() < 0.3:
            tier.discard([block.key for block in chance.sample(stored, 3)])
        if seed == 40:
            tier.purge([SCOPE.root()])
        for event in subscription.take():
            assert event.scope == SCOPE.root()
            (known.discard if event.kind is EventKind.REMOVED else known.add)(event.key)
        assert held(tier) == known
    causes = tier.stats().lives.causes
    assert causes[Cause.ROOM] == tier.stats().evicted > 0
    assert causes[Cause.REQUEST] > 0
    assert tier.stats().lives.lifetime.count == sum(causes.values())


def test_an_event_of_the_disk_tells_tokens_parent_and_size(tier, stream):
    subscription = stream.subscribe()
    ids = blocks(count=2)
    store(tier, ids)
    told = {event.key: event for event in subscription.take()}
    event = told[ids[1].key]
    assert (EventKind.MOVED, TierName.DISK, TierName.HOST) == (event.kind, event.tier, event.source)
    assert (ids[0].key, ids[1].tokens) == (event.parent, event.tokens)
    assert LAYOUT.block_size == event.num_tokens
    assert 0 < event.nbytes <= LAYOUT.nbytes + 4096
