"""A node, or a client of it, is killed at any moment: what is served afterwards is whole."""

import time
from contextlib import contextmanager

import pytest
import torch

from tests.children import FORKS, start_child
from tests.unit.test_node_socket import LAYOUT, joined, prompt, write
from tiers.errors import NodeGone
from tiers.node.client import NodeClient
from tiers.node.node import NodeServer
from tiers.node.settings import NodeSettings


def run_node(socket, disk, parent):
    sizes = {"host_bytes": 1 << 20, "disk_bytes": 64 << 20}
    node = NodeServer(NodeSettings(socket=socket, disk_dir=disk, **sizes))
    node.open()
    parent.send("ready")
    node.run()


def write_on(socket, parent):
    client = NodeClient(socket, LAYOUT)
    client.connect()
    for number in range(10**6):
        ids = prompt(number % 50)
        pairs = client.reserve(ids)
        for position, frame in pairs:
            row = client.memory.rows[frame]
            row[: LAYOUT.nbytes] = ids[position].key[0]  # a block is one byte, all over
        client.commit([frame for _, frame in pairs])
        if number == 5:
            parent.send("writing")


@contextmanager
def child(work, *arguments):
    """A process that does `work`, once it has said so. Killed at the end."""
    here, there = FORKS.Pipe()
    process = start_child(work, *arguments, there)
    there.close()
    try:
        here.recv()
        yield process
    finally:
        process.kill()
        process.join()
        here.close()


def check_blocks(client):
    """Every block that is served is whole; how many there are."""
    served = 0
    for number in range(50):
        ids = prompt(number)
        frames = client.lease(ids)
        for block, frame in zip(ids, frames, strict=False):
            row = client.memory.rows[frame, : LAYOUT.nbytes]
            assert torch.equal(torch.full_like(row, block.key[0]), row), "a block half written"
        client.release(frames)
        served += len(frames)
    return served


@pytest.mark.parametrize("seed", range(2))
def test_a_writer_that_is_killed_leaves_whole_blocks_and_no_lease(tmp_path, seed):
    path = tmp_path / "node.sock"
    with child(run_node, path, tmp_path / "disk"), child(write_on, path) as writer:
        time.sleep(0.02 * seed)
        writer.kill()
        writer.join()
        with joined(path) as client:
            assert 0 < check_blocks(client)
            stats = client.stats()
            assert 1 == stats["num_clients"]
            (pool,) = stats["pools"]
            assert {} == pool["disk"]["faults"]


@pytest.mark.parametrize("seed", range(2))
def test_a_node_that_is_killed_serves_from_its_disk_again(tmp_path, seed):
    path, disk = tmp_path / "node.sock", tmp_path / "disk"
    with child(run_node, path, disk) as node, child(write_on, path), joined(path) as client:
        while not client.stats()["pools"][0]["disk"]["num_blocks"]:
            time.sleep(0.01)
        time.sleep(0.02 * seed)
        node.kill()
        node.join()
        with pytest.raises(NodeGone):
            client.lease(prompt(1))
    with child(run_node, path, tmp_path / "disk"), joined(path) as client:
        assert 0 < check_blocks(client)


def test_a_lease_is_readable_after_its_node_has_died(tmp_path):
    path = tmp_path / "node.sock"
    ids = prompt(1)
    with child(run_node, path, tmp_path / "disk") as node, joined(path) as client:
        write(client, ids)
        frames, memory = client.lease(ids), client.memory
        node.kill()
        node.join()
        found = [bytes(memory.rows[frame, :16].tolist()) for frame in frames]
        assert [each.key for each in ids] == found
