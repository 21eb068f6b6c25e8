"""Two servers share prefixes through a real Redis: the same tokens, and hits that say `remote`."""

from collections.abc import Callable

import pytest

from tests.parity import architectures
from tests.parity.test_engine_tiers import prompt_over
from tests.redis_server import redis_server
from tests.support.disks import publish_all
from tests.support.house import BLOCK, NUM_OUT, House
from tests.support.models import tiny_model
from tiers.remote.objects import open_objects
from tiers.remote.seal import Seal
from tiers.remote.settings import RemoteWrites
from tiers.remote.stacked import StackedTier
from tiers.remote.tier import RemoteTier

pytestmark = pytest.mark.redis

Build = Callable[..., House]


@pytest.fixture
def server(tmp_path):
    """Builds a server by name; each has a folder of its own, and all the same Redis."""
    houses = []
    with redis_server(tmp_path) as url:

        def build(name, writes=RemoteWrites.ALL, model="llama"):
            loaded = model_of(model)
            layout = loaded.layout(BLOCK, None)

            def above(disk):
                objects = open_objects(url, 10.0)
                remote = RemoteTier(objects, layout, disk.read_record, seal=Seal(b"k" * 32))
                return StackedTier(disk, remote, writes)

            houses.append(House(loaded, tmp_path / name, above=above))
            return houses[-1]

        yield build
        for house in houses:
            house.close()


def model_of(name):
    return architectures.served(name) if name == "lfm3" else tiny_model(name)


def drained(house):
    assert isinstance(house.cache.disk, StackedTier)
    publish_all(house.cache.disk.remote)
    return house.cache.disk.remote


@pytest.mark.parametrize("model", ["llama", "gemma2", "lfm3"])
def test_the_second_servers_first_request_hits_remotely(model, server):
    """Its answer equals a computed one, and the loaded blocks go on to its own disk, also those
    that are loaded without their windows."""
    one, two = server("one", model=model), server("two", model=model)
    prompt = prompt_over(model_of(model))
    [(tokens, counts)] = one.ask([prompt])
    assert counts.hit == 0
    one.sink(to_disk=True)
    remote = drained(one)
    assert remote.stats().stored == (len(prompt) + NUM_OUT) // BLOCK

    [(again, counts)] = two.ask([prompt])
    assert again == tokens
    assert counts.hit_remote == len(prompt) // BLOCK * BLOCK
    assert counts.hit_disk == counts.hit_host == counts.hit_device == 0
    assert counts.hit_remote + counts.miss == len(prompt)

    two.sink(to_disk=True)
    [(third, counts)] = two.ask([prompt])
    assert third == tokens
    assert counts.hit_disk == len(prompt) // BLOCK * BLOCK
    assert counts.hit_remote == 0
    assert not drained(two).stats().faults
