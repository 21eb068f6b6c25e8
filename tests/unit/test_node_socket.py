"""A node over its socket: what clients hold ends with them, and nothing they send stops it."""

import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from functools import partial
from unittest.mock import Mock

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.observability.table import MetricSample, node_samples
from tests.patience import until
from tests.support.faulty_storage import FaultyStorage, disk_full
from tests.support.threads import beside
from tiers.blocks.keys import CacheScope, block_ids, token_bytes
from tiers.disk.open import open_disk
from tiers.errors import ConfigurationError, DirectoryLocked, NodeError, NodeGone
from tiers.node import messages
from tiers.node.client import NodeClient
from tiers.node.counters import NodeCounters
from tiers.node.messages import Op, engine_layout
from tiers.node.node import NodeServer
from tiers.node.settings import NodeSettings
from tiers.tier import TierName

LAYOUT = engine_layout(2, 256, 4, "float32")
ROOT = CacheScope(weights=b"w").root()

HUGE = (
    b'{"version": 4, "layout": {"num_layers": 4096, "block_size": 99999, '
    b'"token_items": 999999, "dtype": "float32"}}'
)


def prompt(number, num_blocks=3):
    return block_ids(ROOT, token_bytes([number] * 4 * num_blocks), 4)


@contextmanager
def serving(path, **settings):
    node = NodeServer(NodeSettings(socket=path, host_bytes=1 << 20, **settings))
    node.open()
    with closing(node), beside(node.run):
        try:
            yield node
        finally:
            node.stop()


def below(folder, nbytes=64 << 20):
    """Settings of a node with a disk."""
    return {"disk_dir": folder / "disk", "disk_bytes": nbytes}


@pytest.fixture
def node(path):
    with serving(path) as node:
        yield node


@contextmanager
def joined(path):
    with closing(NodeClient(path, LAYOUT)) as client:
        client.connect()
        yield client


def write(client, ids):
    pairs = client.reserve(ids)
    for position, frame in pairs:
        client.memory.rows[frame, :16] = torch.tensor(list(ids[position].key), dtype=torch.uint8)
    client.commit([frame for _, frame in pairs])


def test_who_only_asks_maps_no_memory(node, path):
    with joined(path), closing(NodeClient(path, LAYOUT, maps=False)) as client:
        before = psutil.Process().num_fds()
        client.connect()
        assert client.memory is None and 2 == psutil.Process().num_fds() - before, "of a socket"


def test_a_run_is_fetched_from_the_disk(path, tmp_path):
    ids = prompt(1)
    with serving(path, **below(tmp_path)), joined(path) as client:
        write(client, ids)
    with serving(path, **below(tmp_path)) as node, joined(path) as client:
        client.fetch(ids)
        while 3 > node.stats()["pools"][0]["disk_hits"]:
            pass
        assert 3 == len(client.lease(ids))
        assert 0 == node.stats()["pools"][0]["host_hits"]


def test_what_a_client_held_ends_with_it(node, path):
    with joined(path) as writer:
        write(writer, prompt(1))
        writer.lease(prompt(1))
        writer.reserve(prompt(2))
    with joined(path) as other:
        assert [TierName.HOST] * 3 == other.probe(prompt(1))
        assert [] == other.probe(prompt(2))
        assert 3 == len(other.reserve(prompt(2))), "its unfinished blocks are free again"


@pytest.mark.parametrize("asks", [Op.LEASE, Op.RESERVE])
def test_what_a_client_asked_before_it_left_is_not_held(node, path, asks, monkeypatch):
    """All its messages are there when the first answer cannot be sent."""
    frames = (1 << 20) // 8192
    ids = prompt(1, num_blocks=frames // 4)
    waits, may, work = threading.Event(), threading.Event(), node._pools.work
    with joined(path) as other:
        write(other, ids)
        monkeypatch.setattr(node._pools, "work", lambda: waits.set() or (may.wait(60) and work()))
        node._wake_up()
        assert waits.wait(60)
        more = ids if asks is Op.LEASE else prompt(2, num_blocks=frames // 4)
        message = messages.pack(asks, messages.pack_run(0, messages.run_of(more)))
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as hasty:
                hasty.connect(str(path))
                hasty.sendall(message * 3)
        may.set()
        while other.stats()["num_clients"] > 1:
            pass
        with joined(path) as another:  # together they can have all that nobody holds
            pairs = other.reserve(prompt(3, num_blocks=frames // 2))
            pairs += another.reserve(prompt(4, num_blocks=frames // 2))
            assert frames == len(pairs)


def test_a_fault_in_the_node_ends_the_client_that_met_it_only(node, path, monkeypatch):
    with joined(path) as other, joined(path) as unlucky:
        monkeypatch.setattr(node, "_handle_frames", lambda *asked: {}["fault"])
        with pytest.raises(NodeError, match="a fault of the node"):
            unlucky.release([0])
        assert 3 == len(other.reserve(prompt(3)))


def test_a_client_cannot_take_the_memory_from_under_the_node(node, path):
    """To read or write beyond the end of a file that was cut is SIGBUS, for everybody."""
    cuts = (
        "import os, sys; from pathlib import Path; from tests.unit.test_node_socket import joined\n"
        "with joined(Path(sys.argv[1])) as client: os.ftruncate(client.memory.file, 0)"
    )
    with joined(path) as client:
        write(client, prompt(1))
        command = [sys.executable, "-c", cuts, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "PermissionError" in done.stderr
        assert len(client.lease(prompt(1))) == 3


def test_a_disk_that_is_full_when_a_client_comes_is_told_to_it(path, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=disk_full()))
    with serving(path, **below(tmp_path, 8 << 20)):
        with pytest.raises(NodeError, match="No space left on device"), joined(path):
            pass
        monkeypatch.undo()
        with joined(path) as client:
            write(client, prompt(1))


def test_a_disk_that_takes_no_blocks_is_in_the_counters(path, tmp_path, monkeypatch):
    """And so in the node's metrics, and in the readiness of a server above it."""
    storage, numbers = FaultyStorage(), itertools.count(1)
    monkeypatch.setattr("tiers.node.below.open_disk", partial(open_disk, storage=storage))

    def disk():
        [found] = NodeCounters(node.stats()).below()
        return found

    def write_until(so):
        while not so(disk()):
            write(client, prompt(next(numbers)))

    with serving(path, **below(tmp_path, 8 << 20)) as node, joined(path) as client:
        write_until(lambda disk: disk.num_blocks > 0)
        assert [""] == [shard.failing for shard in disk().shards]
        storage.arm(1, count=10**6, operations=["commit"])
        write_until(lambda disk: disk.shards[0].failing != "")
        assert f"{LAYOUT.digest().hex()[:8]}/shard-000" == disk().shards[0].name
        samples = list(node_samples(NodeCounters(node.stats())))
        assert MetricSample("cachesvc_disk_shards", ("replacing",), 1) in samples
        storage.arm(0)
        write_until(lambda disk: disk.shards[0].failing == "")


def refused(path, send, reason):
    """The message is refused with this reason, and another client is served as before."""
    with joined(path) as client, joined(path) as other:
        with pytest.raises(NodeError, match=reason):
            send(client)
        with pytest.raises(NodeGone):
            client.stats()
        assert other.stats()["num_clients"] >= 1


def test_frames_of_others_are_neither_committed_nor_released(node, path):
    with joined(path) as owner:
        pairs = owner.reserve(prompt(1))
        refused(path, lambda client: client.commit([pairs[0][1]]), "had not reserved")
        owner.commit([frame for _, frame in pairs])
        frames = owner.lease(prompt(1))
        refused(path, lambda client: client.release([frames[0]]), "had not leased")
        refused(path, lambda client: client.release([999_999]), "had not leased")
        owner.release(frames)
        refused(path, lambda client: client.release([frames[0]]), "had not leased")
        assert owner.lease(prompt(1)) == frames, "what others tried left the block as it was"


@pytest.mark.parametrize(
    ("op", "body", "reason"),
    [
        (Op.HELLO, b"{", "not JSON"),
        (Op.HELLO, b"[" * 100_000, "not JSON"),
        (Op.HELLO, b'{"version": 99}', "version 4"),
        (Op.HELLO, b'{"version": 4, "layout": {"num_layers": 1}}', "has the fields"),
        (Op.HELLO, HUGE, "does not fit"),
        (Op.HELLO, HUGE.replace(b'"float32"', b"[]"), "dtype"),
        (Op.PROBE, b"short", "fewer than its head"),
        (Op.LEASE, struct.pack("<B16s16sIII", 0, b"", b"", 4, 2**31, 0), "does not fit"),
        (Op.LEASE, struct.pack("<B16s16sIII", 200, b"", b"", 4, 0, 0), "no pool 200"),
        (Op.COMMIT, b"abc", "not a list of frames"),
        (Op.RELEASE, struct.pack("<II", 7, 1), "no pool 7"),
        (Op.LOCK, struct.pack("<I", 0), "one piece at a time"),
        (Op.LOCK, struct.pack("<III", 0, 1, 2), "one piece at a time"),
        (Op.LOCK, struct.pack("<II", 0, 1), "no piece 1"),
        (Op.LOCK, struct.pack("<II", 3, 0), "no pool 3"),
        (99, b"", "operation 99"),
    ],
)
def test_a_message_that_makes_no_sense_is_refused(node, path, op, body, reason):
    with joined(path) as other, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        stranger.sendall(messages.HEADER.pack(len(body), op) + body)
        answer = stranger.recv(1 << 16)
        assert Op.REFUSED == answer[4]
        assert reason in answer[5:].decode()
        assert b"" == stranger.recv(1)
        write(other, prompt(3))


def test_a_message_longer_than_any_is_refused_before_it_is_read(node, path):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        stranger.sendall(messages.HEADER.pack(2**32 - 1, Op.PROBE))
        assert b"at most" in stranger.recv(1 << 16)


def test_a_client_that_asks_and_never_reads_is_disconnected(node, path):
    ask = messages.pack(Op.STATS) * 10_000_000
    with joined(path) as other, socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(path))
        deaf.settimeout(60)  # the node gets to it in time, also on a busy machine
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            deaf.sendall(ask)
        assert 1 == other.stats()["num_clients"]


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=400))
def test_any_bytes_as_a_run_are_a_run_or_refused(data):
    try:
        pool, run = messages.unpack_run(memoryview(data))
    except NodeError:
        return
    assert len(run.ids()) * run.block_size * 4 == len(run.tokens)
    assert data[0] == pool


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    tokens=st.integers(-(2**31), 2**31 - 1),
)
def test_a_run_is_read_as_it_was_written(sizes, tokens):
    contents = [b"c" * size for size in sizes]
    ids = block_ids(ROOT, token_bytes([tokens] * 4 * len(sizes)), 4, contents)
    pool, run = messages.unpack_run(memoryview(messages.pack_run(3, messages.run_of(ids))))
    assert (3, ids) == (pool, run.ids())


def test_a_second_node_on_the_same_disk_is_refused_at_its_start(tmp_path):
    disk = below(tmp_path)
    with serving(tmp_path / "a.sock", **disk):
        other = NodeServer(NodeSettings(socket=tmp_path / "b.sock", host_bytes=1 << 20, **disk))
        with pytest.raises(DirectoryLocked, match=r"disk is served by pid .*--disk-cache-dir"):
            other.open()
        assert not (tmp_path / "b.sock").exists()
    with serving(tmp_path / "b.sock", **disk), joined(tmp_path / "b.sock"):
        pass


def test_a_socket_that_a_dead_node_left_is_replaced_and_nothing_else_is(tmp_path):
    def refuses(told, path, error=ConfigurationError):
        with pytest.raises(error, match=told):
            NodeServer(NodeSettings(socket=path, host_bytes=1 << 20)).open()

    path = tmp_path / "node.sock"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as dead:
        dead.bind(str(path))
    with serving(path), joined(path):
        refuses("another node", path, DirectoryLocked)
    path.write_text("mine")
    refuses("not a socket", path)
    assert "mine" == path.read_text()
    refuses("cannot listen", tmp_path / ("x" * 120))


def test_one_connection_holds_at_most_half_of_the_memory(node, path):
    """What one engine leases and reserves cannot be evicted for the others."""
    frames = (1 << 20) // 8192  # a block of two layers is 8 KiB
    with joined(path) as greedy, joined(path) as other:
        ids = prompt(1, num_blocks=frames)
        reserved = greedy.reserve(ids)
        assert frames // 2 == len(reserved)
        assert [] == greedy.reserve(ids[frames // 2 :])
        greedy.commit([frame for _, frame in reserved])
        leased = greedy.lease(ids)
        assert frames // 2 == len(leased) == len(greedy.probe(ids))
        assert [] == greedy.lease(ids[:1]) == greedy.reserve(prompt(2))
        write(other, prompt(2))
        assert [TierName.HOST] * 3 == other.probe(prompt(2))
        greedy.release(leased)
        assert 3 == len(greedy.lease(prompt(2)))


def test_no_thread_of_a_node_gives_way_to_other_processes(path, tmp_path):
    """It may have the GIL when it waits for a processor: whoever asks the node would wait too."""
    with serving(path, **below(tmp_path)), joined(path) as client:
        write(client, prompt(1))
        until(lambda: not client.stats()["pools"][0]["is_writing"])
        threads = threading.enumerate()
        niceness = {each.name: os.getpriority(os.PRIO_PROCESS, each.native_id) for each in threads}
    assert {"cachesvc-disk-write", "cachesvc-touch"} <= niceness.keys()
    assert {os.getpriority(os.PRIO_PROCESS, 0)} == set(niceness.values())
