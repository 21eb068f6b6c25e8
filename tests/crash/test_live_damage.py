"""Damage to the pages of a shard that a server has open: no answer is wrong, the process lives on,
and the shard takes blocks again.

Each seed is a child process, which damages its own shard between reads and writes.
"""

import os
import random
import shutil
from contextlib import suppress

import pytest

from cachesvc.server.watch import _degraded
from tests.children import in_child
from tests.crash.test_disk_damage import (
    CAPACITY,
    CHAINS,
    FRESH,
    LAYOUT,
    PAGE,
    blocks,
    data_file,
    filled,
    num_served,
    store,
)
from tests.patience import until
from tiers.disk.inspection.verify import verify_all
from tiers.disk.open import open_disk
from tiers.disk.recovery.page import Torn
from tiers.disk.recovery.pages import PageFile, Walked
from tiers.errors import MissReason

HOW = ("random", "copy", "index over index", "zero", "flip", "metas random", "metas zero", "cut")


def harm(path, rng, how=""):
    """Damages the file in place, as a device, another program or an operator would."""
    data = path.read_bytes()
    num_pages = len(data) // PAGE
    index = in_use(path) or [n for n in range(2, num_pages) if data[n * PAGE + 10] in (1, 2)]
    how = how or rng.choice(HOW)
    victims = rng.sample(index, min(len(index), rng.choice([1, 1, 2, 8])))
    with path.open("r+b") as file:
        if how == "cut":
            file.truncate(rng.choice([0, PAGE, rng.randrange(len(data))]))
        elif how.startswith("metas"):
            pages = rng.randbytes(2 * PAGE) if how == "metas random" else bytes(2 * PAGE)
            os.pwrite(file.fileno(), pages, 0)
        else:
            for page in victims:
                other = rng.choice(index if how == "index over index" else range(num_pages)) * PAGE
                new = {"random": rng.randbytes(PAGE), "zero": bytes(PAGE)}.get(
                    how, data[other : other + PAGE]
                )
                if how == "flip":
                    flipped = bytearray(data[page * PAGE : (page + 1) * PAGE])
                    at = rng.choice([rng.randrange(64), rng.randrange(PAGE)])
                    flipped[at] ^= 1 << rng.randrange(8)
                    new = bytes(flipped)
                os.pwrite(file.fileno(), new, page * PAGE)
    return how


def in_use(path):
    """The branch and leaf pages of the last commit, those of its free list among them."""
    walked = Walked()
    with path.open("rb") as file:
        pages = PageFile(file.fileno(), CAPACITY)
        with suppress(Torn):
            for head in pages.heads()[:1]:
                for tree in (head.free, head.main, *pages.trees(head).values()):
                    for _ in pages.nodes(tree, walked):
                        pass
    return walked.branch + walked.leaf


def live_on(root, seed):
    rng = random.Random(seed)
    tier = open_disk(root, LAYOUT, CAPACITY)
    for _ in range(3):
        print(f"seed {seed}: {harm(data_file(root), rng)}", flush=True)
        for _ in range(rng.choice([2, 40])):
            use(tier, rng)
    until_ready(tier)
    for chain in FRESH:
        store(tier, chain)
        assert num_served(tier, chain) == 8, "what was just written is not served"
    with tier.view() as view:
        assert () == verify_all(view.shards).structure
    tier.close()


def use(tier, rng):
    seed = rng.choice(CHAINS)
    act = rng.choice(["read", "read", "write", "write", "new", "discard", "flush", "stats"])
    if act == "read":
        num_served(tier, seed)
    elif act in ("write", "new"):
        store(tier, seed if act == "write" else rng.randrange(2000, 9000))
    elif act == "discard":
        tier.discard([block.key for block in blocks(seed)])
    elif act == "flush":
        tier.flush()
    else:
        tier.stats()


def until_ready(tier):
    """The first write after the damage finds it, and a check may run in another process."""
    for seed in range(4):
        store(tier, 10_000 + seed)
    until(lambda: tier.flush() or tier.stats().shards[0].ready)


def trial(template, root, seed):
    shutil.copytree(template, root)
    status = in_child(live_on, root, seed)
    shutil.rmtree(root)
    return status


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("template") / "disk")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 183), marks=pytest.mark.slow)])
def test_a_server_outlives_its_cache(template, tmp_path, seeds):
    failed = {seed: trial(template, tmp_path / str(seed), seed) for seed in seeds}
    assert {} == {seed: status for seed, status in failed.items() if status}


@pytest.mark.parametrize("how", ["metas random", "metas zero", "index over index", "zero"])
def test_what_happened_to_a_shard_is_said_now_and_at_the_next_start(
    template, tmp_path, caplog, how
):
    root = tmp_path / "disk"
    shutil.copytree(template, root)
    tier = open_disk(root, LAYOUT, CAPACITY)
    for seed in range(3):
        harm(data_file(root), random.Random(seed), how)
    for seed in CHAINS:
        num_served(tier, seed)
        store(tier, seed)
    until_ready(tier)
    (shard,) = tier.stats().shards
    assert "shard-000 was replaced by an empty shard: " in shard.repaired
    assert tier.stats().faults[MissReason.TORN] > 0
    assert {"repaired": [shard.repaired]} == _degraded(tier.stats())
    tier.close()
    caplog.clear()
    for said in (1, 0):
        open_disk(root, LAYOUT, CAPACITY).close()
        assert said == caplog.text.count(f"since the last start, {shard.repaired}"), "once"
        caplog.clear()
