"""A quote says of each block the tier where it stands, and the request then hits it there."""

import asyncio
from array import array

import pytest

from api.job import Job
from cachesvc.operator.lookups import CacheSurvey
from engine.request import SamplingParams
from tests.parity.test_engine_tiers import prompt_over
from tests.support.house import BLOCK, House
from tests.support.models import tiny_model
from tiers.blocks.keys import CacheScope

LOADED = tiny_model("llama")


@pytest.fixture
def house(tmp_path):
    running = House(LOADED, tmp_path)
    yield running
    running.close()


def spread(cache):
    """The first block stays on the device, the second goes to the host, the rest to disk."""
    assert cache.flush() == 0
    for block in [*cache.index, *cache.index.iter_partials()]:
        if block.slot is not None and (block.key is None or block.depth >= 1):
            cache.residency.evict_device(block)
    for block in [*cache.index]:
        if block.frame is not None and block.depth >= 2:
            cache.residency.evict_host(block)


def quoted(house, prompt):
    job = Job(
        request_id="quoted",
        model=None,
        prompts=(array("i", prompt),),
        params=SamplingParams(),
        scope=CacheScope(layout=house.cache.layout.digest(), adapter=b""),
    )
    return asyncio.run(CacheSurvey(house.engine.call, BLOCK)(job))


def test_a_quote_finds_a_block_in_each_tier_and_the_request_hits_it_there(house):
    prompt = prompt_over(LOADED)
    house.ask([prompt])
    house.engine.call(lambda _: spread(house.cache)).result(60)
    for _ in range(2):  # to quote moves nothing
        assert [{"device": BLOCK, "host": BLOCK, "disk": 2 * BLOCK}] == quoted(house, prompt)
    [(_, counts)] = house.ask([prompt])
    assert (BLOCK, BLOCK, 2 * BLOCK) == (counts.hit_device, counts.hit_host, counts.hit_disk)


def test_the_last_token_of_a_fully_cached_prompt_is_not_quoted(house):
    prompt = prompt_over(LOADED)[: 3 * BLOCK]
    house.ask([prompt])
    house.engine.call(lambda _: spread(house.cache)).result(60)
    assert [{"device": BLOCK, "host": BLOCK, "disk": BLOCK - 1}] == quoted(house, prompt)
