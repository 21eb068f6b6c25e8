"""Two nodes on one Redis: what the first machine's engine computed is a hit on the second's."""

from contextlib import closing

import pytest

from tests.patience import until
from tests.redis_server import redis_server
from tests.unit.test_node_socket import ROOT, below, joined, prompt, serving, write
from tests.unit.test_vllm_operations import GROUPS, TOKENS, Parts, Vllm, operations
from tiers.blocks.chain import Chain
from tiers.errors import ConfigurationError
from tiers.node.node import NodeServer
from tiers.node.settings import NodeSettings
from tiers.remote.settings import RemoteSettings, RemoteWrites
from tiers.tier import TierName

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]

PATIENT = "?socket_timeout=60&socket_connect_timeout=60"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url + PATIENT


def over(folder, url, writes=RemoteWrites.ALL):
    return {**below(folder), "remote": RemoteSettings(url, writes)}


def sent(client):
    return int(client.stats()["pools"][0]["remote"]["stored"])


def test_a_second_node_serves_what_the_first_computed(tmp_path, url):
    one, two, ids = tmp_path / "one.sock", tmp_path / "two.sock", prompt(1)
    settings = over(tmp_path / "two", url)
    with serving(one, **over(tmp_path / "one", url)), joined(one) as first:
        write(first, ids)
        until(lambda: sent(first) == len(ids))
    with serving(two, **settings), joined(two) as second:
        assert [TierName.REMOTE] * 3 == second.probe(ids)
        frames = second.lease(ids)
        found = [bytes(second.memory.rows[frame, :16].tolist()) for frame in frames]
        assert [each.key for each in ids] == found
        second.release(frames)
        assert [TierName.HOST] * 3 == second.probe(ids)
        counts = second.stats()["pools"][0]
        assert (0, 3) == (counts["disk_hits"], counts["remote_hits"])
    with serving(two, **settings), joined(two) as again:
        assert [TierName.DISK] * 3 == again.probe(ids), "what came from afar is kept near"


def test_by_default_a_block_is_sent_at_its_second_hit(tmp_path, url):
    path, ids = tmp_path / "node.sock", prompt(2)
    with serving(path, **over(tmp_path, url, RemoteWrites.REUSED)), joined(path) as client:
        write(client, ids)
        until(lambda: not client.stats()["pools"][0]["is_writing"])
        client.release(client.lease(ids[:2]))
        assert 0 == sent(client)
        client.release(client.lease(ids[:2]))
        until(lambda: sent(client) == 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_prefix_is_published_as_far_as_every_group_and_rank_can_resume(tmp_path, url, num_ranks):
    path = tmp_path / "node.sock"
    with (
        serving(path, **over(tmp_path, url, RemoteWrites.REUSED)),
        closing(Parts(path, num_ranks)) as parts,
        closing(operations(path, Vllm(), num_ranks, GROUPS)) as hands,
    ):
        for number, client, ids in parts.runs():
            for place in {0: [0, 1, 2, 3, 4], 1: [0, 1, 2], 2: [0, 2]}[number]:
                write(client, ids[place : place + 1])
        chain = Chain(ROOT, TOKENS, 4)
        assert 3 == hands.publish(chain).result(120), "the window ends there, and has a state"
        parts.write()
        assert 5 == hands.publish(chain).result(120)


def test_an_invalid_remote_tier_is_refused_at_the_start(tmp_path):
    sizes = {"socket": tmp_path / "node.sock", "host_bytes": 1 << 20}
    with pytest.raises(ConfigurationError, match="needs a disk"):
        NodeServer(NodeSettings(**sizes, remote=RemoteSettings("redis://127.0.0.1:1/0"))).open()
    with pytest.raises(ConfigurationError, match="memcached"):
        NodeServer(NodeSettings(**sizes, **over(tmp_path, "memcached://somewhere"))).open()
