"""What happens to a node's blocks is told in its stream, which the node publishes."""

import json
from collections import Counter
from itertools import pairwise

import pytest

from cachesvc.config.sections import CacheSection, EventsSection
from cachesvc.server.vllm import node as vllm_node
from tests.patience import until
from tests.unit.test_node_operations import settled
from tests.unit.test_node_socket import below, joined, prompt, serving, write
from tiers.telemetry.events import BlockEvent, Subscription


def heard(subscription: Subscription, num_events: int) -> list[BlockEvent]:
    found: list[BlockEvent] = []
    until(lambda: found.extend(subscription.take()) or len(found) >= num_events)
    return found


def test_what_is_stored_written_moved_and_removed_is_told(tmp_path):
    path, disk = tmp_path / "node.sock", below(tmp_path)
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


ZMQ = {"endpoint": "tcp://127.0.0.1:5557", "topic": "kv-events"}
OTHER = {"endpoint": "tcp://*:5557", "topic": "t"}


@pytest.mark.parametrize(
    ("zmq", "expected"), [("", None), ("tcp://127.0.0.1:5557", ZMQ), (OTHER, OTHER)]
)
def test_a_node_that_the_server_starts_is_told_what_the_servers_settings_say(
    zmq, expected, tmp_path, monkeypatch
):
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> None:
        started.append(command)
        raise InterruptedError

    monkeypatch.setattr(vllm_node.subprocess, "Popen", start)
    events, cache = EventsSection(zmq=zmq).publisher, CacheSection(disk_reserve_bytes=7)
    with pytest.raises(InterruptedError):
        vllm_node.ensure_node(tmp_path / "s", cache, tmp_path, events)
    [command] = started
    told = dict(pairwise(command))
    assert "7" == told["--disk-reserve"]
    assert expected is None or expected.items() <= json.loads(told["--events"]).items()
    assert ("--events" in told) == (expected is not None)
