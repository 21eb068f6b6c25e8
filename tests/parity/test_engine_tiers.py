"""A hit never changes an answer: the same greedy tokens with the cache off, and from each tier.

Real models, small and seeded, behind the real engine, with the real disk tier.
"""

from dataclasses import replace

import pytest

from engine.errors import InvalidParameter, UnknownAdapter
from engine.models.load import LoadedModel, load_adapter
from tests.support.house import BLOCK
from tests.support.models import save_tiny_adapter, tiny_model
from tests.support.requests import request
from tiers.blocks.contents import Content


def prompt_over(loaded: LoadedModel) -> list[int]:
    return [(7 * i * i + 3) % loaded.vocab_size for i in range(4 * BLOCK + 11)]


def test_an_adapter_hits_its_own_blocks_in_every_tier_and_nobody_elses(
    open_house, tmp_path_factory
):
    """Base and two adapters ask the same at once: each computes it, each hits its own alone."""
    folders = [tmp_path_factory.mktemp("adapter") for _ in range(2)]
    loaded = tiny_model("llama")
    for number, folder in enumerate(folders):
        save_tiny_adapter(folder, seed=number, r=4, target_modules="all-linear")
        load_adapter(loaded, f"a{number}", str(folder))
    prompt = prompt_over(loaded)
    three, names = [prompt] * 3, ("a0", None, "a1")
    first = open_house(loaded, device_blocks=60)
    expected = [answer for answer, _ in first.ask(three, cache=False, adapters=names)]
    assert len({tuple(answer) for answer in expected}) == 3
    cold = first.ask(three, adapters=names)
    assert [(answer, 0) for answer in expected] == [(answer, c.hit) for answer, c in cold]
    for to_disk, tier in ((None, "hit_device"), (False, "hit_host"), (True, "hit_disk")):
        if to_disk is not None:
            first.sink(to_disk=to_disk)
        hits = first.ask(three, adapters=names)
        assert expected == [answer for answer, _ in hits]
        assert all(getattr(counts, tier) >= 4 * BLOCK for _, counts in hits)
    first.close()
    again = tiny_model("llama")  # after a restart the names have changed hands
    load_adapter(again, "a0", str(folders[1]))
    load_adapter(again, "renamed", str(folders[0]))
    second = open_house(again, device_blocks=60)
    other, renamed = second.ask([prompt] * 2, adapters=("a0", "renamed"))
    assert (expected[2], 4 * BLOCK) == (other[0], other[1].hit_disk)
    assert (expected[0], 4 * BLOCK) == (renamed[0], renamed[1].hit_disk)
    second.close()
    third_adapter = tmp_path_factory.mktemp("adapter")
    save_tiny_adapter(third_adapter, seed=9, r=4)
    load_adapter(again, "a0", str(third_adapter))
    third = open_house(again, device_blocks=60)
    [(_, counts)] = third.ask([prompt], adapters=("a0",))
    assert 0 == counts.hit


def test_equal_placeholders_of_other_pictures_meet_in_no_tier(open_house):
    """Each finds its own blocks on the device, the host, the disk, and after a restart.

    From the picture on: the block before it is the same for all three.
    """
    loaded = tiny_model("llama")
    prompt = [5] * BLOCK + [7] * (3 * BLOCK + 4)
    pictures = [(Content(BLOCK, 3 * BLOCK, digest * 32),) for digest in (b"c", b"d")] + [()]
    first = open_house(loaded)
    cold = first.ask([prompt] * 3, contents=pictures)
    assert all(counts.hit <= BLOCK for _, counts in cold)
    for to_disk, tier in ((None, "hit_device"), (False, "hit_host"), (True, "hit_disk")):
        if to_disk is not None:
            first.sink(to_disk=to_disk)
        again = first.ask([prompt] * 3, contents=pictures)
        assert [answer for answer, _ in cold] == [answer for answer, _ in again]
        assert all(getattr(counts, tier) >= 3 * BLOCK for _, counts in again)
    first.close()
    second = open_house(loaded)
    other = (Content(BLOCK, 3 * BLOCK, b"e" * 32),)
    restarted = second.ask([prompt] * 2, contents=[pictures[1], other])
    assert [4 * BLOCK, BLOCK] == [counts.hit for _, counts in restarted]
    assert second.cache.index.collisions == 0


def test_an_adapter_unknown_to_the_engine_is_refused_by_name(open_house):
    loaded = tiny_model("llama")
    engine = open_house(loaded).engine
    asked = request([1], adapter="pirate")
    with pytest.raises(InvalidParameter, match=r"contents\[0\] covers tokens 0 to 2"):
        engine.submit(replace(asked, adapter=None, contents=(Content(0, 2, b"x"),)))
    with pytest.raises(UnknownAdapter, match=r"no adapter 'pirate' is loaded \(loaded: none\)"):
        engine.submit(asked)
