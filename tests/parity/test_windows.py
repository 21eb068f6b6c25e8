"""Layers with a sliding window: of a long prefix only the last window is loaded, and no answer is
changed by it.

Every slot and frame that nobody owns is filled with NaN before a hit, so that reading what was not
loaded shows.
"""

import random
import time
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.models.load import LoadedModel
from tests.parity import architectures
from tests.parity.test_architectures import prompt
from tests.support.house import BLOCK
from tests.support.models import described
from tiers.blocks.chain import Chain
from tiers.disk.format.record import window_key
from tiers.tier import TierName

NUM_BLOCKS = 20
LONG = prompt(NUM_BLOCKS * BLOCK + 11, seed=1)
SHORT = LONG[: 10 * BLOCK + 3]  # ends where a longer prefix needs no windows
HOST_TO_DEVICE = TierName.HOST, TierName.DEVICE
DISK_TO_HOST = TierName.DISK, TierName.HOST

# By model type, the kinds of its layers: sliding ones and full ones.
KINDS = {"gemma3_text": "SSSSSF", "gpt_oss": "SFSF", "olmo3": "SSFS", "mistral": "SS"}


@lru_cache(maxsize=2)
def windowed(model_type: str) -> LoadedModel:
    """A tiny model whose windows are 24 tokens, a block and a half."""
    if model_type not in KINDS:
        return architectures.served(model_type)
    config: Any = architectures.config_of(model_type)
    kinds = KINDS[model_type]
    config.num_hidden_layers = len(kinds)
    if "F" in kinds:
        names = {"S": "sliding_attention", "F": "full_attention"}
        config.layer_types = [names[kind] for kind in kinds]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return described(model_type, model)


@pytest.fixture(params=[*KINDS, "lfm3"])
def loaded(request):
    return windowed(request.param)


@pytest.fixture
def open_house(open_house):
    return partial(open_house, share_tails=False, device_blocks=60)


def free_places(places):
    return [*places._free, *(place for free in places._lesser_free.values() for place in free)]


def sink(house, *, to_disk):
    """Everything off the device; what memory is then nobody's holds no numbers."""
    house.sink(to_disk=to_disk)

    def spoil(_):
        cache = house.cache
        pool, frames = cache.pool, cache.residency.frames
        for slot in free_places(pool.places):
            rows = pool.tensor[slot].view(-1)
            (rows[: pool._lasting] if pool.places.is_lesser(slot) else rows).fill_(torch.nan)
        for number in free_places(frames.places):
            frames.tensor(number).fill_(torch.nan)

    house.engine.call(spoil).result(60)


def narrow(house):
    """The long prompt's blocks come from disk, all but its last ones without their windows."""
    house.ask([LONG])
    sink(house, to_disk=True)
    house.ask([LONG])


def moved(house):
    stats = house.engine.call(lambda _: house.cache.stats()).result(60)
    told = {lane: transfer.nbytes for lane, transfer in stats.transfers.items()}
    return {**told, "read": stats.disk.read_bytes}


def check(house):
    house.engine.call(lambda _: house.cache.residency.check()).result(60)


def root_of(disk):
    with disk.view() as view:
        return next(iter(view.blocks())).scope


def needed(house, num_blocks):
    """Bytes of a prefix of which no more than its last windows is moved."""
    layout = house.cache.layout
    whole = min(layout.reach, num_blocks)
    return whole * layout.nbytes + (num_blocks - whole) * layout.lasting_nbytes


def test_a_long_hit_moves_its_last_windows_alone_and_answers_as_cold(loaded, open_house):
    house = open_house(loaded)
    layout = house.cache.layout
    assert 2 == layout.reach
    if loaded.name in KINDS:
        sliding = KINDS[loaded.name].count("S") / len(KINDS[loaded.name])
        assert layout.lasting_nbytes == round(layout.nbytes * (1 - sliding))
    [(cold, counts)] = house.ask([LONG], cache=False)
    answers = [house.ask([LONG])[0][0], house.ask([LONG])[0][0]]
    sink(house, to_disk=False)
    before = moved(house)
    answers.append(house.ask([LONG])[0][0])
    host = moved(house)
    assert needed(house, NUM_BLOCKS) == host[HOST_TO_DEVICE] - before[HOST_TO_DEVICE]
    sink(house, to_disk=True)
    [(answer, counts)] = house.ask([LONG])
    disk = moved(house)
    assert NUM_BLOCKS * BLOCK == counts.hit_disk
    for lane in (DISK_TO_HOST, HOST_TO_DEVICE):
        assert needed(house, NUM_BLOCKS) == disk[lane] - host[lane]
    # Float32 noise is hardly compressed: what is read is what is needed and the headers.
    assert disk["read"] - host["read"] < needed(house, NUM_BLOCKS) + NUM_BLOCKS * 4096
    house.close()
    second = open_house(loaded)
    [(restarted, counts)] = second.ask([LONG])
    assert NUM_BLOCKS * BLOCK == counts.hit_disk
    assert [cold] * 5 == [*answers, answer, restarted]


def test_a_shorter_prefix_fetches_the_windows_that_a_longer_one_left_behind(loaded, open_house):
    house = open_house(loaded)
    [(expected, _)] = house.ask([SHORT], cache=False)
    house.ask([LONG])
    for lower in (False, True):
        sink(house, to_disk=True)
        house.ask([LONG])  # from disk, without the windows of all but its last blocks
        if lower:
            sink(house, to_disk=False)  # which are then in host memory without them, too
        before = moved(house)
        [(answer, counts)] = house.ask([SHORT])
        assert (expected, 10 * BLOCK) == (answer, counts.hit)
        layout = house.cache.layout
        windows = layout.reach * (layout.nbytes - layout.lasting_nbytes)
        assert windows == moved(house)[DISK_TO_HOST] - before[DISK_TO_HOST]


def test_a_prefix_whose_windows_are_nowhere_is_cut_and_made_whole_by_computing(loaded, open_house):
    house = open_house(loaded)
    [(expected, _)] = house.ask([SHORT], cache=False)
    narrow(house)

    def lose(_):
        cache = house.cache
        keys = [block.key for block in cache.index if block.key is not None]
        assert len(keys) <= cache.disk.discard(keys)

    house.engine.call(lose).result(60)
    [(answer, counts)] = house.ask([SHORT])
    assert (expected, 0) == (answer, counts.hit)
    [(answer, counts)] = house.ask([SHORT])
    assert (expected, 10 * BLOCK) == (answer, counts.hit_device)
    [(answer, counts)] = house.ask([LONG])
    assert (NUM_BLOCKS * BLOCK) == counts.hit_device


def test_whichever_windows_have_left_the_disk_a_prefix_ends_where_they_are(loaded, open_house):
    """Window parts leave one by one, at random; hits are the longest possible, answers as cold."""
    house = open_house(loaded)
    disk, reach = house.cache.disk, house.cache.layout.reach
    chance = random.Random(loaded.name)
    house.ask([LONG])
    sink(house, to_disk=True)
    root = root_of(disk)
    partial = 0
    for _ in range(6):
        asked = LONG[: chance.randint(2, NUM_BLOCKS) * BLOCK + 3]
        ids = Chain(root, asked, BLOCK).block_ids(0, len(asked) // BLOCK)
        keys = [block.key for block in ids]
        gone = chance.sample(keys, len(keys) // 4)
        house.engine.call(lambda _, gone=gone: disk.discard(list(map(window_key, gone)))).result(60)
        there = disk.have_windows(ids)
        ends = (n for n in range(len(keys), 0, -1) if all(there[max(0, n - reach) : n]))
        expected = next(ends, 0)
        partial += 0 < expected < len(keys)
        [(cold, _)] = house.ask([asked], cache=False)
        before = moved(house)
        [(answer, counts)] = house.ask([asked])
        assert (cold, expected * BLOCK) == (answer, counts.hit_disk)
        read = moved(house)[DISK_TO_HOST] - before[DISK_TO_HOST]
        assert needed(house, expected) == read, "no more is read than is used"
        sink(house, to_disk=True)
        assert disk.have_windows(ids[expected:]) == [True] * (len(keys) - expected)
    assert partial


def test_blocks_in_memory_end_where_their_windows_are_below(loaded, open_house, monkeypatch):
    """Blocks without windows in memory, and a hole among their windows on disk."""
    house = open_house(loaded)
    disk, reach = house.cache.disk, house.cache.layout.reach
    narrow(house)
    ids = Chain(root_of(disk), LONG, BLOCK).block_ids(0, NUM_BLOCKS)
    keys = [block.key for block in ids]
    house.engine.call(lambda _: disk.discard([window_key(keys[8])])).result(60)
    [(expected, _)] = house.ask([SHORT], cache=False)
    load = disk.load

    def slow(ids, into):
        time.sleep(0.1)  # the ticket is looked at meanwhile
        return load(ids, into)

    monkeypatch.setattr(disk, "load", slow)
    [(answer, counts)] = house.ask([SHORT])  # ten blocks
    assert reach == 2
    assert (expected, 8 * BLOCK) == (answer, counts.hit)
    assert disk.have_windows(ids[:8]) == [True] * 8


def test_blocks_without_windows_are_written_and_get_them_back_where_they_are_computed(
    loaded, open_house
):
    house = open_house(loaded)
    disk, reach = house.cache.disk, house.cache.layout.reach
    cold = [house.ask([tokens], cache=False)[0][0] for tokens in (LONG, SHORT)]
    narrow(house)

    def drop(_):
        residency = house.cache.residency
        for block in residency.index:
            assert block.key is not None and disk.discard([block.key])
            residency.queue.dropped(block)
            residency.host.sync(block)

    house.engine.call(drop).result(60)
    sink(house, to_disk=True)
    ids = Chain(root_of(disk), LONG, BLOCK).block_ids(0, NUM_BLOCKS)
    assert [False] * (NUM_BLOCKS - reach) + [True] * reach == disk.have_windows(ids)
    [(answer, counts)] = house.ask([LONG])
    assert (cold[0], NUM_BLOCKS * BLOCK) == (answer, counts.hit_disk)
    [(answer, counts)] = house.ask([SHORT])  # its blocks are in memory, their windows nowhere
    assert (cold[1], 0) == (answer, counts.hit)
    sink(house, to_disk=True)
    assert [True] * 10 == disk.have_windows(ids[:10])
    [(answer, counts)] = house.ask([SHORT])
    assert (cold[1], 10 * BLOCK) == (answer, counts.hit_disk)


def test_the_host_holds_more_blocks_than_frames_where_windows_are_not_needed(loaded, open_house):
    house = open_house(loaded, host_blocks=26)
    assert house.cache.layout.num_lesser > 1
    prompts = [prompt(NUM_BLOCKS * BLOCK + 11, seed=seed) for seed in (3, 4)]
    cold = [house.ask([tokens], cache=False)[0][0] for tokens in prompts]
    for tokens in prompts:
        house.ask([tokens])
        sink(house, to_disk=True)
    for tokens in prompts:
        house.ask([tokens])  # from disk, without the windows of all but its last blocks
    sink(house, to_disk=False)
    hits = 0
    for tokens, expected in zip(prompts, cold, strict=True):
        [(answer, counts)] = house.ask([tokens])
        assert (expected, NUM_BLOCKS * BLOCK) == (answer, counts.hit)
        hits += counts.hit_host
    assert hits == 2 * NUM_BLOCKS * BLOCK, "of 40 blocks in 26 frames"
    check(house)


def test_the_device_holds_more_blocks_than_slots_where_windows_are_not_needed(loaded, open_house):
    house = open_house(loaded, device_blocks=36)
    prompts = [prompt(NUM_BLOCKS * BLOCK + 11, seed=seed) for seed in (3, 4)]
    cold = [house.ask([tokens], cache=False)[0][0] for tokens in prompts]
    for tokens in prompts:
        house.ask([tokens])
        house.engine.call(lambda _: house.cache.flush()).result(60)
        house.ask([tokens])  # needs the windows of its last blocks alone
    for _ in range(2):
        for tokens, expected in zip(prompts, cold, strict=True):
            [(answer, counts)] = house.ask([tokens])
            assert (expected, NUM_BLOCKS * BLOCK) == (answer, counts.hit_device)
    check(house)


def test_a_block_gets_its_windows_back_while_another_request_reads_it(loaded, open_house):
    """It moves to a whole slot, and the other's block table follows."""
    house = open_house(loaded, device_blocks=48)
    asked = [LONG + prompt(70, seed=2), SHORT, LONG[: 15 * BLOCK] + prompt(9, seed=3)]
    expected = [house.ask([tokens], cache=False)[0][0] for tokens in asked]
    narrow(house)
    num_lesser = house.engine.call(lambda _: house.cache.pool.places.num_lesser_taken).result(60)
    assert num_lesser == NUM_BLOCKS - house.cache.layout.reach
    told = house.ask(asked)
    assert expected == [answer for answer, _ in told]
    assert [NUM_BLOCKS * BLOCK, 10 * BLOCK, 15 * BLOCK] == [counts.hit for _, counts in told]
    assert house.cache.num_moved == 2 * house.cache.layout.reach
    check(house)
