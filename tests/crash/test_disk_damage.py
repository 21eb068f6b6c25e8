"""Damage to any page of a shard: no crash, no refused start, no tier that stores no more.

A folder is filled, copied and damaged from a seed. A child process then opens it, reads, writes,
and opens it once more, because LMDB answers some damage with a signal.
"""

import random
import shutil

import pytest

from tests.children import in_child
from tests.patience import until
from tests.support.faulty_storage import chain, fetched, put, take
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.disk.inspection.verify import verify_all
from tiers.disk.open import open_disk

LAYOUT = BlockLayout.uniform(1, 16, 2, 16, "float32")
CAPACITY = 2 << 20
PAGE = 4096
FRAMES = take(FrameArena(LAYOUT, 9), 9)
META, BRANCH, LEAF = 0x08, 0x01, 0x02
CHAINS = range(60)
FRESH = range(1000, 1004)


def blocks(seed):
    return chain(8, block_size=LAYOUT.block_size, seed=seed)


def store(tier, seed):
    put(tier, blocks(seed), FRAMES)


def num_served(tier, seed):
    """Blocks of a chain that are served; one with wrong bytes ends the child."""
    return fetched(tier, blocks(seed), FRAMES).num_blocks


def filled(root):
    """A folder that has been written, read, evicted from and reopened; closed properly."""
    for _ in range(2):
        tier = open_disk(root, LAYOUT, CAPACITY)
        for seed in CHAINS:
            store(tier, seed)
            num_served(tier, seed // 2)
        tier.discard([blocks(7)[7].key])
        tier.close()
    return root


def data_file(root):
    return root / "shard-000" / "data.mdb"


def damage(root, seed):
    """Damage a page or two of the shard, mostly of its structure; says what was done."""
    rng = random.Random(seed)
    path = data_file(root)
    data = bytearray(path.read_bytes())
    num_pages = len(data) // PAGE
    kinds = {
        at: int.from_bytes(data[at * PAGE + 10 : at * PAGE + 12], "little")
        for at in range(num_pages)
    }
    structure = [at for at, kind in kinds.items() if kind in (META, BRANCH, LEAF)]
    done = []
    for _ in range(rng.choice([1, 1, 2, 8])):
        page = rng.choice(structure if rng.random() < 0.9 else range(num_pages))
        start = page * PAGE
        how = rng.choice(["flip", "head", "zero", "random", "swap", "tear", "cut"])
        if how == "flip":
            for _ in range(rng.choice([1, 4, 64])):
                at = start + rng.randrange(PAGE)
                data[at] ^= 1 << rng.randrange(8)
        elif how == "head":
            at = start + rng.randrange(64)
            data[at] ^= 1 << rng.randrange(8)
        elif how == "zero":
            data[start : start + PAGE] = bytes(PAGE)
        elif how == "random":
            data[start : start + PAGE] = rng.randbytes(PAGE)
        elif how == "swap":
            other = rng.choice(structure) * PAGE
            mine = bytes(data[start : start + PAGE])
            data[start : start + PAGE] = data[other : other + PAGE]
            data[other : other + PAGE] = mine
        elif how == "tear":
            half = rng.randrange(8) * 512
            data[start + half : start + half + 512] = rng.randbytes(512)
        elif rng.random() < 0.3:
            del data[start + rng.choice([0, 100]) :]
            data += bytes(max(0, rng.choice([0, 0, num_pages * PAGE - len(data)])))
            done.append(f"cut at page {page}")
            break
        done.append(f"{how} page {page} ({kinds[page]:#x})")
    path.write_bytes(data)
    if rng.random() < 0.1:
        (path.parent / "lock.mdb").write_bytes(rng.randbytes(rng.choice([100, 8192])))
    return ", ".join(done)


def live(root):
    """Open, read, write and reopen a damaged folder; raises where the tier does not serve."""
    for life in range(2):
        tier = open_disk(root, LAYOUT, CAPACITY)
        for seed in CHAINS:
            num_served(tier, seed)
        for seed in CHAINS:
            store(tier, seed)
        for seed in FRESH:
            store(tier, seed)
        tier.flush()
        for seed in FRESH:
            store(tier, seed)
            assert num_served(tier, seed) == 8, f"life {life}: what was just written is not served"
        stats = tier.stats()
        assert stats.shards[0].ready
        assert stats.used_bytes <= CAPACITY
        with tier.view() as view:
            assert verify_all(view.shards).sound, f"life {life}: {verify_all(view.shards)}"
        tier.close()


def trial(template, root, seed):
    """What went wrong with one damaged copy; None where nothing did."""
    shutil.copytree(template, root)
    done = damage(root, seed)
    status = in_child(live, root)
    shutil.rmtree(root)
    return f"seed {seed}: {done}: status {status}" if status else None


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("template") / "disk")


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_page_costs_blocks_only(template, tmp_path, seed):
    """A sample; what verifies may be served, and the tier takes new blocks at once."""
    assert trial(template, tmp_path / "damaged", seed) is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_hundred_damages(template, tmp_path):
    failed = [trial(template, tmp_path / str(seed), seed) for seed in range(100, 400)]
    assert not [why for why in failed if why]


def write_until_cut(root, seed):
    """Write on after a flush, and leave both states of the file: what surely stands, and what the
    system may have written of it when the power goes."""
    rng, path = random.Random(seed), data_file(root)
    tier = open_disk(root, LAYOUT, CAPACITY)
    for number in range(rng.randrange(4)):
        store(tier, 100 + number)
    tier.flush()
    shutil.copy(path, root / "flushed")
    for number in range(1 + rng.randrange(12)):
        store(tier, 200 + number)
        if rng.random() < 0.2:
            tier.discard([blocks(200 + number)[0].key])
    shutil.copy(path, root / "written")


def cut_power(root, seed):
    """Each page written since the flush has reached the disk, or has not."""
    rng = random.Random(seed)
    old, new = (root / "flushed").read_bytes(), (root / "written").read_bytes()
    reached = rng.choice([0.05, 0.5, 0.95])
    pages = [
        (new if rng.random() < reached else old.ljust(len(new), b"\0"))[at : at + PAGE]
        for at in range(0, len(new), PAGE)
    ]
    data_file(root).write_bytes(b"".join(pages))


def serve_while_checked(root):
    """The shard cannot be walked before it is served: what is served meanwhile is right, and then
    it takes new blocks."""
    tier = open_disk(root, LAYOUT, CAPACITY, check_s=0)
    written = [*CHAINS, *range(100, 104), *range(200, 212)]
    for seed in written:
        num_served(tier, seed)
    until(lambda: tier.flush() or tier.stats().shards[0].ready)
    for seed in (*written, *FRESH):
        num_served(tier, seed)
    store(tier, FRESH[0])
    assert num_served(tier, FRESH[0]) == 8
    with tier.view() as view:
        assert verify_all(view.shards).sound
    tier.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("start", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_power_cut_at_any_moment_on_a_shard_too_large_to_walk(template, tmp_path, start):
    for seed in range(start, start + (100 if start else 6)):
        root = tmp_path / str(seed)
        shutil.copytree(template, root)
        assert in_child(write_until_cut, root, seed) == 0
        cut_power(root, seed)
        assert in_child(serve_while_checked, root) == 0, f"seed {seed}"
        shutil.rmtree(root)
