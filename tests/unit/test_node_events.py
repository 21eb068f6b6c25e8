"""What happens to a node's blocks is told in its stream, which the node publishes."""

import json
import time
from collections import Counter

import pytest

from cachesvc.config.sections import CacheSection, EventsSection
from cachesvc.server.vllm import node as vllm_node
from tests.unit.test_node_operations import below, settled
from tests.unit.test_node_socket import joined, prompt, serving, write
from tiers.telemetry.events import BlockEvent, Subscription


def heard(subscription: Subscription, num_events: int) -> list[BlockEvent]:
    found: list[BlockEvent] = []
    give_up = time.monotonic() + 60
    while len(found) < num_events:
        assert time.monotonic() < give_up
        found += subscription.take()
        time.sleep(0.01)
    return found


def test_what_is_stored_written_moved_and_removed_is_told(tmp_path):
    path, disk = tmp_path / "node.sock", below(tmp_path / "disk")
    with serving(path, **disk) as node, joined(path) as client:
        subscription = node.stream.subscribe()
        write(client, prompt(1))
        settled(client)
        told = [(str(each.kind), str(each.tier)) for each in heard(subscription, 6)]
        assert {("stored", "host"): 3, ("moved", "disk"): 3} == Counter(told)
        client.operate("evict", keys=[prompt(1)[2].key.hex()])
        told = [(str(each.kind), str(each.tier)) for each in heard(subscription, 2)]
        assert {("removed", "host"), ("removed", "disk")} == set(told)
    with serving(path, **disk) as node, joined(path) as client:
        subscription = node.stream.subscribe()
        client.release(client.lease(prompt(1)))
        first, second = heard(subscription, 2)
        assert ("moved", "host", "disk") == (first.kind, first.tier, first.source)
        assert prompt(1)[0].tokens == first.tokens
        assert prompt(1)[0].key == second.parent


@pytest.mark.parametrize(
    ("zmq", "expected"),
    [
        ("", None),
        ("tcp://127.0.0.1:5557", {"endpoint": "tcp://127.0.0.1:5557", "topic": "kv-events"}),
        ({"endpoint": "tcp://*:5557", "topic": "t"}, {"endpoint": "tcp://*:5557", "topic": "t"}),
    ],
)
def test_a_node_that_the_server_starts_publishes_what_the_servers_setting_says(
    zmq, expected, tmp_path, monkeypatch
):
    class Started(Exception):
        pass

    def start(command: list[str], **_: object) -> None:
        raise Started(command)

    monkeypatch.setattr(vllm_node.subprocess, "Popen", start)
    events = EventsSection(zmq=zmq).publisher
    with pytest.raises(Started) as started:
        vllm_node.ensure_node(tmp_path / "s", CacheSection(), tmp_path, events)
    command = started.value.args[0]
    if expected is None:
        assert "--events" not in command
    else:
        given = json.loads(command[command.index("--events") + 1])
        assert expected.items() <= given.items()
