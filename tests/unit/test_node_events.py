"""What happens to a node's blocks is told: to clients that listen, and in a server's own stream."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cachesvc.server.vllm.relay import NodeRelay
from tests.unit.test_node_operations import below, settled
from tests.unit.test_node_socket import LAYOUT, ROOT, joined, prompt, serving, write
from tiers.errors import NodeError
from tiers.node import listening as listening_module
from tiers.node.client import NodeClient
from tiers.node.listening import event_fields, publish_fields
from tiers.telemetry.events import BlockEvent, EventKind, EventStream, Subscription
from tiers.tier import Cause, TierName


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.sock"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_module, "WAIT_S", 0.05)


@contextmanager
def listening(path: Path) -> Iterator[NodeClient]:
    with closing(NodeClient(path)) as client:
        client.open()
        assert [] == client.listen()["events"], "nothing happened yet"
        yield client


def heard(client: NodeClient, num_events: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    until(lambda: found.extend(client.listen()["events"]) or len(found) >= num_events)
    return found


def test_a_listener_hears_what_is_stored_written_moved_and_removed(path, tmp_path):
    disk = below(tmp_path / "disk")
    with serving(path, **disk), joined(path) as client, listening(path) as listener:
        write(client, prompt(1))
        settled(client)
        told = [(each["kind"], each["tier"]) for each in heard(listener, 6)]
        assert {("stored", "host"): 3, ("moved", "disk"): 3} == Counter(told)
        client.operate("evict", keys=[prompt(1)[2].key.hex()])
        told = [(each["kind"], each["tier"]) for each in heard(listener, 2)]
        assert {("removed", "host"), ("removed", "disk")} == set(told)
    with serving(path, **disk), joined(path) as client, listening(path) as listener:
        client.release(client.lease(prompt(1)))
        first, second = heard(listener, 2)
        assert ("moved", "host", "disk") == (first["kind"], first["tier"], first["source"])
        assert prompt(1)[0].tokens.hex() == first["tokens"]
        assert prompt(1)[0].key.hex() == second["parent"]


def test_a_listener_that_goes_ends_its_place_in_the_stream(path):
    with serving(path) as node:
        with listening(path):
            assert 1 == node.stream.num_subscribers
        with closing(NodeClient(path)) as client:
            client.open()
            client.stats()  # answered after the node has seen that the other went
            until(lambda: not node.stream.num_subscribers)


def until(done: Callable[[], object]) -> None:
    give_up = time.monotonic() + 60
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def take_until(subscription: Subscription, num_events: int) -> list[BlockEvent]:
    found: list[BlockEvent] = []
    until(lambda: found.extend(subscription.take()) or len(found) >= num_events)
    return found


def test_a_server_tells_what_happens_in_its_node_and_what_its_end_clears(path):
    stream = EventStream()
    with closing(NodeRelay(path, stream)) as relay:
        relay.start()
        subscription = stream.subscribe()
        with serving(path) as node, joined(path) as client:
            until(lambda: node.stream.num_subscribers)
            write(client, prompt(1))
            told = take_until(subscription, 3)
            assert [each.key for each in prompt(1)] == [event.key for event in told]
            assert (ROOT, EventKind.STORED) == (told[0].scope, told[0].kind)
            assert LAYOUT.block_size == told[0].num_tokens
        (cleared,) = take_until(subscription, 1)
        assert (EventKind.CLEARED, TierName.HOST) == (cleared.kind, cleared.tier)
        with serving(path) as node, joined(path) as client:  # it is heard again
            until(lambda: node.stream.num_subscribers)
            write(client, prompt(2))
            assert 3 == len(take_until(subscription, 3))


def test_events_that_were_lost_clear_what_was_believed(path, monkeypatch):
    stream = EventStream()
    answers = iter([{"events": [], "missed": 0}, {"events": [], "missed": 7}])

    def listen(client: NodeClient) -> dict[str, object]:
        try:
            return next(answers)
        except StopIteration:
            time.sleep(0.01)
            return {"events": [], "missed": 7}

    monkeypatch.setattr(NodeClient, "listen", listen)
    with serving(path), closing(NodeRelay(path, stream)) as relay:
        subscription = stream.subscribe()
        relay.start()
        told = take_until(subscription, 2)
        assert [TierName.HOST, TierName.DISK] == [event.tier for event in told]
        assert {EventKind.CLEARED} == {event.kind for event in told}


def test_nobody_asks_the_node_while_nobody_listens(path):
    with serving(path) as node, closing(NodeRelay(path, EventStream())) as relay:
        relay.start()
        with joined(path) as client:
            for number in range(5):
                write(client, prompt(number))
            assert 1 == client.stats()["num_clients"]
        assert not node.stream.listening


def test_an_event_is_read_as_it_was_told():
    stream = EventStream()
    subscription = stream.subscribe()
    block = prompt(1)[1]
    event = BlockEvent(
        EventKind.REMOVED, TierName.HOST, block.key, block.parent, block.scope,
        b"", 4096, None, Cause.QUOTA,
    )  # fmt: skip
    publish_fields(stream, event_fields(event))
    (read,) = subscription.take()
    assert event_fields(event) == event_fields(read)
    with pytest.raises(NodeError, match="cannot be read"):
        publish_fields(stream, {"kind": "eaten", "tier": "host"})
