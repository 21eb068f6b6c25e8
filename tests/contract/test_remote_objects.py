"""One suite over real stores: Redis, a Redis cluster of three nodes, and S3's protocol.

The S3 server is moto's, a stand-in for the protocol: it says nothing of a real bucket's rates or
consistency.
"""

import socket
import threading

import pytest

from tests.crash.test_disk_damage import FRAMES, LAYOUT, blocks
from tests.patience import until
from tests.redis_server import redis_cluster, redis_server
from tests.support.disks import publish_all
from tests.support.faulty_storage import SCOPE, fetched, put
from tiers.disk.open import open_disk
from tiers.errors import MissReason
from tiers.remote.objects import RemoteError, open_objects
from tiers.remote.settings import RemoteWrites
from tiers.remote.stacked import StackedTier
from tiers.remote.tier import RemoteTier
from tiers.tier import Loaded, TierName

pytestmark = pytest.mark.redis

TIMEOUT_S = 10.0  # beside busy processes
NO_BUCKET = "s3://b?endpoint=http://127.0.0.1:1&access_key_id=k&secret_access_key=k"


def s3_server():
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        import httpx

        httpx.put(f"{endpoint}/blocks", headers={"Host": f"{host}:{port}"}).raise_for_status()
        access = "access_key_id=test&secret_access_key=test&region=us-east-1"
        yield f"s3://blocks/shared?endpoint={endpoint}&{access}"
    finally:
        server.stop()


@pytest.fixture(scope="module", params=["redis", "redis cluster", "s3"])
def url(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    if request.param == "redis":
        with redis_server(folder) as url:
            yield url
    elif request.param == "redis cluster":
        with redis_cluster(folder) as (url, _):
            yield url
    else:
        pytest.importorskip("obstore")
        yield from s3_server()


def stacked(root, url, timeout_s=TIMEOUT_S):
    disk = open_disk(root, LAYOUT, 2 << 20)
    remote = RemoteTier(open_objects(url, timeout_s), LAYOUT, disk.read_record)
    return StackedTier(disk, remote, RemoteWrites.ALL)


def read(store, names):
    found = dict.fromkeys(range(len(names)))
    store.read(names, lambda number, value: found.update({number: bytes(value)}))
    return [*found.values()]


def store(tier, seed):
    assert put(tier, blocks(seed), FRAMES) == []


def load(tier, seed):
    return fetched(tier, blocks(seed), FRAMES)


def test_objects_are_put_found_listed_and_deleted(url):
    store = open_objects(url, TIMEOUT_S)
    names = [f"test/{number:02x}" for number in range(20)]
    assert store.exists(names) == [False] * 20
    assert read(store, names[:2]) == [None, None]
    for name in names[::2]:
        store.put(name, name.encode() * 500_000)
    assert store.exists(names) == [True, False] * 10
    values = [name.encode() * 500_000 for name in names]
    assert read(store, names[:3]) == [values[0], None, values[2]]
    assert sorted(store.names("test/")) == names[::2]
    assert store.delete(names[::2]) == 10
    assert list(store.names("test/")) == []
    store.close()


def test_a_value_cut_short_is_an_error_one_of_another_type_is_empty_and_the_next_is_read(tmp_path):
    with redis_server(tmp_path) as url:
        store = open_objects(url, TIMEOUT_S)
        store._client().rpush("a list", "value")
        store.put("empty", b"")
        assert [False, True] == store.exists(["empty", "a list"]), "the one can be written anew"
        for number in range(8):
            store.put(f"{number}", bytes([number]) * (1 << 21))
        for beside in (["0", "1"], []):
            *found, wrong = read(store, [*beside, "a list"])
            assert b"" == wrong and [bytes([int(name)]) * (1 << 21) for name in beside] == found
            assert read(store, ["2", "none", "3"]) == [b"\2" * (1 << 21), None, b"\3" * (1 << 21)]
        taken: list[int] = []
        store.read(["2", "3", "4"], lambda at, _: taken.append(at) or store.delete(["3"]))
        assert [0, 2] == taken, "the rest of a value was gone when it was asked for"
        store.close()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            link = server.accept()[0]
            while b"GET" not in (asked := link.recv(1 << 16)):
                link.sendall(b"+OK\r\n" * asked.count(b"CLIENT") + b":9\r\n" * (b"STRLEN" in asked))
            link.sendall(b"$9\r\nshort")
            link.close()

        threading.Thread(target=answer).start()
        store = open_objects(f"redis://127.0.0.1:{server.getsockname()[1]}", TIMEOUT_S)
        with pytest.raises(RemoteError, match="within a value"):
            read(store, ["1"])


def test_a_slot_that_moved_is_found_again(tmp_path):
    """The first read asks the node that had it, and learns where it is now."""
    with redis_cluster(tmp_path) as (url, _):
        store = open_objects(f"{url}/0?socket_timeout=7", TIMEOUT_S)
        store.put("name", b"old")
        client = store._client()
        slot, old = client.keyslot("name"), client.get_node_from_key("name")
        new = next(node for node in client.get_primaries() if node != old)
        links = {node: client.get_redis_connection(node) for node in client.get_primaries()}
        assert 7 == links[new].connection_pool.connection_kwargs["socket_timeout"]
        links[old].delete("name")
        number = links[new].execute_command("CLUSTER", "MYID").decode()
        for node in (new, *links):
            links[node].execute_command("CLUSTER", "SETSLOT", slot, "NODE", number)
        links[new].set("name", b"new")
        with pytest.raises(RemoteError, match="Moved"):
            read(store, ["name"])
        assert read(store, ["name"]) == [b"new"]
        store.close()


def test_two_servers_share_a_prefix(url, tmp_path):
    """What one wrote, the other is served, byte for byte; a purge by one takes it from both."""
    one, two = stacked(tmp_path / "one", url), stacked(tmp_path / "two", url)
    store(one, 1)
    publish_all(one.remote)
    assert two.probe(blocks(1)) == 8
    assert load(two, 1) == Loaded(8, None, (TierName.REMOTE,) * 8)
    assert two.count([SCOPE.root()]) == 8
    one.purge([SCOPE.root()])
    assert load(two, 1) == Loaded(0, MissReason.ABSENT)
    assert not two.remote.stats().faults
    one.close()
    two.close()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "redis+cluster://127.0.0.1:1", NO_BUCKET])
def test_a_store_that_is_not_there_is_a_miss(tmp_path, url):
    """The first calls are misses within their time, later ones at once. What the disk has, hits."""
    tier = stacked(tmp_path, url, 0.2)
    assert put(tier.disk, blocks(1)[:3], FRAMES) == []
    for _ in range(5):
        assert tier.probe(blocks(1)) == 3
        assert load(tier, 1) == Loaded(3, MissReason.IO_ERROR, (TierName.DISK,) * 3)
    assert tier.remote.breaker.num_opened == 1
    with pytest.raises(RemoteError):
        tier.purge([SCOPE.root()])
    tier.close()


def test_a_node_of_a_cluster_killed_under_load_costs_hits_only(tmp_path):
    """No wrong byte and no exception; what the other nodes hold is served again."""
    with redis_cluster(tmp_path) as (url, nodes):
        one = stacked(tmp_path / "one", url, 0.5)
        for seed in range(8):
            store(one, seed)
        publish_all(one.remote)
        two = stacked(tmp_path / "two", url, 0.5)
        assert load(two, 0).num_blocks == 8
        nodes[2].kill()
        nodes[2].wait(20)
        for seed in range(8, 12):
            store(one, seed)
            load(two, seed % 8)
        until(lambda: any(load(two, seed).num_blocks for seed in range(8)))
        assert two.remote.stats().faults[MissReason.IO_ERROR] > 0
        assert [load(one, seed).num_blocks for seed in range(12)] == [8] * 12
        one.close()
        two.close()
