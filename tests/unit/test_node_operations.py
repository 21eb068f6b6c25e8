"""What operators do to a node's blocks over its socket: pins, purges and evictions; and what is
told of its blocks in the stream that it publishes."""

import json
import time
from collections import Counter
from itertools import pairwise

import pytest

from cachesvc.config.sections import CacheSection, EventsSection
from cachesvc.server.vllm import node as vllm_node
from tests.patience import until
from tests.unit.test_node_socket import ROOT, below, joined, prompt, serving, write
from tiers.errors import NodeError
from tiers.telemetry.events import BlockEvent, Subscription
from tiers.tier import TierName


def settled(client):
    while client.stats()["pools"][0]["is_writing"]:
        time.sleep(0.01)


def keys(ids):
    return [each.key.hex() for each in ids]


def pinned(client, name, ids, for_s=3600):
    about = {"scope": ROOT.hex(), "keys": keys(ids), "for_s": for_s, "why": "test", "owner": ""}
    return client.operate("pin", name=name, **about)


@pytest.fixture
def client(path, tmp_path):
    with serving(path, **below(tmp_path)), joined(path) as client:
        yield client


def test_a_purge_removes_a_scope_from_memory_and_disk_and_keeps_it_closed(client, path):
    ids = prompt(1)
    write(client, ids)
    settled(client)
    pinned(client, "p", ids)
    done = client.operate("purge", roots=[ROOT.hex()])
    assert (3, 3) == (done["removed"]["host"][0], done["removed"]["disk"][0])
    assert (0, ["p"]) == (done["num_left"], done["pins"])
    with joined(path) as engine:
        write(engine, ids)
        assert [] == engine.probe(ids), "what a running request stores late is not kept"
        client.operate("open")
        write(engine, ids)
        assert 3 == len(engine.probe(ids))


def test_what_a_client_closed_opens_when_it_goes(client, path):
    with joined(path) as operator:
        operator.operate("purge", roots=[ROOT.hex()])
        write(client, prompt(1))
        assert [] == client.probe(prompt(1))
    while client.stats()["num_clients"] > 1:
        time.sleep(0.01)
    write(client, prompt(1))
    assert 3 == len(client.probe(prompt(1)))


def test_pins_outlive_the_node(path, tmp_path):
    with serving(path, **below(tmp_path)), joined(path) as client:
        write(client, prompt(1))
        assert "pin" in pinned(client, "system", prompt(1))
        client.operate("saved")
    with serving(path, **below(tmp_path)), joined(path) as client:
        (pin,) = client.operate("pins")["pins"]
        assert ("system", 12) == (pin["name"], pin["num_tokens"])
        assert {"host": 0, "disk": 0} == client.operate("evict", keys=keys(prompt(1)))
        assert client.operate("unpin", name="system")["found"]
        assert {"host": 0, "disk": 3} == client.operate("evict", keys=keys(prompt(1)))
        assert [] == client.probe(prompt(1))


def test_an_eviction_leaves_alone_what_is_in_use_in_every_tier(client):
    """Memory counts on the copy below and would drop the block once it is idle."""
    ids = prompt(1)
    write(client, ids)
    settled(client)
    frames = client.lease(ids[:2])
    assert {"host": 1, "disk": 1} == client.operate("evict", keys=keys(ids))
    client.release(frames)
    assert {"host": 2, "disk": 2} == client.operate("evict", keys=keys(ids))


def test_a_pin_that_is_too_large_is_refused_and_the_connection_stays(client):
    refused = pinned(client, "all", prompt(1, 3000))
    assert "may be" in refused["refused"] and refused["excess"] > 0
    write(client, prompt(1))
    assert [TierName.HOST] * 3 == client.probe(prompt(1))


@pytest.mark.parametrize(
    "asked",
    [
        {"what": "dance"},
        {"what": "purge"},
        {"what": "purge", "roots": ["zz"]},
        {"what": "purge", "roots": ["00"]},
        {"what": "pin", "name": "x"},
        {"what": "pin", "name": "x", "for_s": float("nan")},
        {"what": "pin", "name": "x", "for_s": 10**400},
        {"what": "evict", "keys": 7},
        {"what": "pins", "pool": 99},
        {"what": "pins", "pool": -1},
        {"what": "pins", "pool": "0"},
    ],
)
def test_what_is_no_operation_is_refused(client, asked):
    with pytest.raises(NodeError, match=r"is not an operation|there is no pool"):
        client.operate(**asked)
    client.connect()
    assert [] == client.operate("pins")["pins"]


def test_a_node_without_a_remote_tier_publishes_nothing(client):
    write(client, prompt(1))
    assert 0 == client.publish(prompt(1))


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
