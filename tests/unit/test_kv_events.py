"""Block events over ZMQ, read by a subscriber that knows vLLM's wire format and nothing of ours."""

import random
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import ZmqTable
from cachesvc.observability.kv_events import KvEventPublisher, block_hash, wire_events
from cachesvc.observability.kv_replay import KEPT_BATCHES, KEPT_BYTES
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tiers.blocks.keys import PrefixKey
from tiers.telemetry.events import EventKind, EventStream
from tiers.tier import TierName

ANYWHERE = "tcp://127.0.0.1:*"
POLL_MS = 5000


class Router:
    """Keeps what each medium holds, as a router does: by the fields that vLLM documents."""

    def __init__(self, publisher: KvEventPublisher, topic: bytes = b"kv-events") -> None:
        events, replay = publisher.endpoints
        self._context = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.sub.connect(events)
        self.req = self._context.socket(zmq.DEALER)
        self.req.connect(replay)
        self.last = -1
        self.batches: list[Any] = []
        self.held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "DISK": set()}
        self.tokens: dict[int, list[int]] = {}
        self.parents: dict[int, int | None] = {}
        self.num_cleared = 0
        self.topics: list[list[bytes]] = []  # frames before the number in each replayed batch

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self) -> None:
        """One batch of the PUB socket, and before it what was missed."""
        assert self.sub.poll(POLL_MS), "no batch came"
        _, number_bytes, payload = self.sub.recv_multipart()
        number = int.from_bytes(number_bytes, "big")
        if number > self.last + 1:
            self.replay(self.last + 1)
        self._take(number, payload)

    def read_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.receive()

    def replay(self, first: int) -> list[int]:
        """The numbers of the batches that the server has kept from `first` on."""
        self.req.send_multipart((b"", first.to_bytes(8, "big")))
        numbers = []
        while True:
            assert self.req.poll(POLL_MS), "the replay does not end"
            _, topic, number, payload = self.req.recv_multipart()
            self.topics.append(topic)
            if not payload:
                assert -1 == int.from_bytes(number, "big", signed=True)
                return numbers
            numbers.append(int.from_bytes(number, "big"))
            self._take(numbers[-1], payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number <= self.last:
            return
        assert number == self.last + 1, "a batch was lost"
        self.last = number
        time_s, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(time_s, float) and rank == 0
        self.batches.append(events)
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.num_cleared += 1
            for hashes in self.held.values():
                hashes.clear()
        elif event["type"] == "BlockRemoved":
            self.held[event["medium"]] -= set(event["block_hashes"])
        else:
            assert event["type"] == "BlockStored" and event["block_size"] == BLOCK
            self.held[event["medium"]] |= set(event["block_hashes"])
            parent = event["parent_block_hash"]
            for number, each in enumerate(event["block_hashes"]):
                self.tokens[each] = event["token_ids"][number * BLOCK : (number + 1) * BLOCK]
                self.parents[each], parent = parent, each


@pytest.fixture
def route():
    opened: list[Router] = []

    def open_one(publisher: KvEventPublisher, topic: bytes = b"kv-events") -> Router:
        opened.append(Router(publisher, topic))
        return opened[-1]

    yield open_one
    for router in opened:
        router.close()


@pytest.fixture
def publish():
    opened: list[KvEventPublisher] = []

    def open_one(stream: EventStream, **settings: Any) -> KvEventPublisher:
        section = ZmqTable(**{"endpoint": ANYWHERE, "replay_endpoint": ANYWHERE, **settings})
        opened.append(KvEventPublisher(stream, section))
        return opened[-1]

    yield open_one
    for publisher in opened:
        publisher.close()


def test_a_router_knows_what_a_real_cache_holds(publish, route):
    """Requests at random through a small engine; a router that reads every batch agrees with it."""
    world = World(device_blocks=20, host_blocks=24)
    publisher = publish(world.cache.stream)
    publisher.start()
    router = route(publisher)
    chance = random.Random(3)
    trunk = [chance.randrange(50) for _ in range(20)]
    for number in range(30):
        world.submit(f"r{number}", [*trunk[: chance.randrange(1, 20)], number % 50], max_tokens=6)
        world.run()
    world.check_idle()
    assert world.cache.residency.counters.lives[TierName.HOST].stats().causes
    index = list(world.cache.index)
    device = {block_hash(b.key) for b in index if b.key and b.slot is not None}
    host = {block_hash(b.key) for b in index if b.key and b.frame is not None}
    router.read_until(lambda: (router.held["GPU"], router.held["CPU"]) == (device, host))
    while router.sub.poll(50):
        router.receive()
    assert (device, host) == (router.held["GPU"], router.held["CPU"])
    for block in index:
        assert block.key is not None and block.parent is not None
        assert router.tokens[block_hash(block.key)] == list(memoryview(block.tokens).cast("i"))
        begins = block.parent == block.scope
        assert router.parents[block_hash(block.key)] == (
            None if begins else block_hash(block.parent)
        )


def store(stream: EventStream, number: int) -> None:
    key = PrefixKey(number.to_bytes(16, "big"))
    stream.publish(EventKind.STORED, TierName.DEVICE, key=key, tokens=b"\0" * 4 * BLOCK)


def test_a_router_that_comes_late_asks_for_what_it_missed(publish, route):
    stream = EventStream()
    publisher = publish(stream)
    publisher.start()
    early = route(publisher)
    early.replay(0)
    for number in range(3):
        store(stream, number)
        while number not in early.held["GPU"]:
            early.receive()
    late = route(publisher)
    assert list(range(early.last + 1)) == late.replay(0)
    assert [*[b"kv-events"] * (early.last + 1), b""] == late.topics
    assert early.held == late.held
    assert [early.last] == early.replay(early.last)
    assert [] == late.replay(early.last + 1)


def test_a_router_that_reads_slowly_gets_every_kept_batch_and_the_end(publish, route):
    publisher = publish(EventStream())
    removed = {"type": "BlockRemoved", "block_hashes": [0] * 6000, "medium": "GPU"}
    for _ in range(1 + KEPT_BATCHES):
        publisher._publish([removed])
    slow, other = route(publisher), route(publisher)
    publisher.start()
    slow.req.send_multipart((b"", (0).to_bytes(8, "big")))
    assert slow.req.poll(POLL_MS)  # begun; nothing is read yet
    other.last = KEPT_BATCHES
    assert [KEPT_BATCHES + 1] == other.replay(KEPT_BATCHES + 1), "it waits for the slow one"
    numbers = []
    while not numbers or numbers[-1] >= 0:
        assert slow.req.poll(POLL_MS), "the replay does not end"
        numbers.append(int.from_bytes(slow.req.recv_multipart()[-2], "big", signed=True))
    assert [*range(2, KEPT_BATCHES + 2), -1] == numbers


def test_a_router_that_never_reads_is_sent_a_short_queue_until_it_goes(publish, route):
    publisher = publish(EventStream())
    for _ in range(KEPT_BATCHES):
        publisher._publish([{"type": "BlockRemoved", "block_hashes": [0] * 6000, "medium": "GPU"}])
    publisher.start()
    stuck, other = route(publisher), route(publisher)
    other.last = KEPT_BATCHES
    stuck.req.send_multipart((b"", (0).to_bytes(8, "big")))
    assert stuck.req.poll(POLL_MS)
    other.replay(KEPT_BATCHES)
    while len(owed := list(publisher._replay._owed.values())) > 1:
        time.sleep(0.001)  # the publisher's thread strikes off whom it has answered
    assert 0 < owed[0] < KEPT_BATCHES
    stuck.close()
    while publisher._replay._owed:
        other.replay(KEPT_BATCHES)


def test_what_is_kept_for_replays_is_bounded_in_bytes(publish, route):
    publisher = publish(EventStream())
    large = {"type": "BlockStored", "token_ids": [1 << 20] * 200_000}  # 5 bytes each
    for _ in range(KEPT_BYTES // 1_000_000 + 3):
        publisher._publish([large])
    assert publisher._replay._kept_bytes <= KEPT_BYTES
    assert KEPT_BYTES // 1_000_001 == len(publisher._replay._kept)


def test_lost_events_void_what_routers_know(publish, route):
    stream = EventStream()
    publisher = publish(stream, topic="other")
    publisher._subscription._capacity = 4
    for number in range(10):
        store(stream, number)
    publisher.start()
    router = route(publisher, b"other")
    while router.last < 2:
        router.replay(router.last + 1)
    assert [{"type": "AllBlocksCleared"}] == router.batches[0], "a new server holds nothing"
    assert 2 == router.num_cleared
    assert {6, 7, 8, 9} == router.held["GPU"]
    store(stream, 10)
    while 10 not in router.held["GPU"]:  # it has subscribed to this topic alone
        router.receive()


def test_blocks_that_follow_each_other_travel_as_one_event():
    stream = EventStream()
    subscription = stream.subscribe()
    scope = PrefixKey(b"s" * 16)
    keys = [PrefixKey(bytes([n]) * 16) for n in range(4)]
    for parent, key in zip([scope, *keys], keys, strict=False):
        stream.publish(
            EventKind.STORED, TierName.DISK, key=key, parent=parent, scope=scope, tokens=b"\1\0\0\0"
        )
    stream.publish(EventKind.REMOVED, TierName.DISK, key=keys[3])
    stream.publish(EventKind.REMOVED, TierName.DISK, key=keys[1])
    stored, removed = wire_events(subscription.take())
    assert [block_hash(key) for key in keys] == stored["block_hashes"]
    assert ([1, 1, 1, 1], None) == (stored["token_ids"], stored["parent_block_hash"])
    assert [(scope.hex(),)] * 4 == stored["extra_keys"]
    assert [block_hash(keys[3]), block_hash(keys[1])] == removed["block_hashes"]
    assert "DISK" == stored["medium"] == removed["medium"]


def test_an_endpoint_that_cannot_be_is_said_at_the_start():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for endpoint in (f"tcp://127.0.0.1:{port}", "udp:nowhere"):
            with pytest.raises(ConfigError, match=r"cannot listen on events\.zmq = "):
                KvEventPublisher(EventStream(), ZmqTable(endpoint=endpoint))
