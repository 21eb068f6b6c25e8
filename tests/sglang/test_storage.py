"""Our disk as a storage backend of SGLang's HiCache, whose host pools and factory are real."""

import ast
import subprocess
import sys
import threading
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.sglang.conftest import CLASSES
from tests.support.faulty_storage import FaultyStorage
from tiers.disk.open import open_disk
from tiers.errors import DirectoryLocked

pytestmark = pytest.mark.sglang
COUNT = 16


def keys(count=COUNT, first=0):
    return [f"{number:064x}" for number in range(first, first + count)]


def slots(count=COUNT, first=0):
    """The indices of pages of a host pool."""
    return torch.arange(first * 64, (first + count) * 64)


def files_of(folder):
    return [each for each in Path(folder).rglob("*") if each.is_file()]


@pytest.fixture
def kv(sglang):
    return {sglang.types.PoolName.KV: sglang.mha()}


@pytest.fixture
def held(sglang, opened, kv):
    """A backend that holds COUNT pages, and those pages."""
    [pool] = kv.values()
    wanted, storage = sglang.filled(pool, COUNT), opened(kv)
    assert [True] * COUNT == storage.batch_set_v1(keys(), slots())
    return storage, wanted


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_come_back_in_place_after_a_restart_in_either_layout(sglang, opened, kind, layout):
    pool = getattr(sglang, kind)(layout)
    pools, latents = {sglang.types.PoolName.KV: pool}, kind == "mla"
    wanted, storage = sglang.filled(pool, COUNT), opened(pools, latents=latents)
    assert all(storage.batch_set_v1(keys(), slots()))
    for _ in range(2):
        assert COUNT == storage.batch_exists(keys(COUNT + 4))
        sglang.wiped(pool, COUNT)
        served = storage.batch_get_v1(keys(COUNT + 4), slots(COUNT + 4))
        assert [True] * COUNT + [False] * 4 == served
        assert wanted == sglang.pages_of(pool, COUNT)
        storage.close()
        storage = opened(pools, latents=latents)


def test_a_set_returns_once_its_slots_may_be_used_again(sglang, opened, kv):
    [pool] = kv.values()
    storage = opened(kv)
    for first in range(0, 3 * COUNT, COUNT):
        wanted = sglang.filled(pool, COUNT, first)
        assert all(storage.batch_set_v1(keys(first=first), slots()))
        sglang.wiped(pool, COUNT)
        assert all(storage.batch_get_v1(keys(first=first), slots()))
        assert wanted == sglang.pages_of(pool, COUNT)


def test_what_exists_is_counted_from_the_front_and_a_page_needs_all_its_pieces(held):
    storage, _ = held
    storage._disk.discard(storage._pools["kv"].keys([keys()[5]], [1]))  # its values
    assert 5 == storage.batch_exists(keys())
    assert not storage.exists(keys()[5])
    assert [number != 5 for number in range(COUNT)] == storage.batch_get_v1(keys(), slots())
    assert all(storage.batch_set_v1(keys(), slots()))
    assert COUNT == storage.batch_exists(keys())
    assert 0 == storage.batch_exists([*keys(1, first=99), *keys()])


def test_several_pools_are_found_as_sglangs_own_file_backend_finds_them(sglang, opened, tmp_path):
    """A prefix is restored only where the index of each page and the last state are held."""
    names, drawn = sglang.types.PoolName, np.random.default_rng(7)
    trailing, transfer = sglang.types.PoolHitPolicy.TRAILING_PAGES, sglang.types.PoolTransfer
    latents = sglang.mla()
    pools = {names.KV: latents, names.INDEXER: sglang.indexer(latents), names.MAMBA: sglang.mamba()}
    theirs = sglang.types.HiCacheFile(sglang.config(latents=True), str(tmp_path))
    for name, pool in pools.items():
        theirs.register_mem_host_pool_v2(pool, name)
    ours = opened(pools, latents=True)
    for turn in range(12):
        pages, stored = keys(8, first=100 * turn), []
        wanted = {name: sglang.filled(pool, 8, turn) for name, pool in pools.items()}
        for name, pool in pools.items():
            some = np.flatnonzero(drawn.random(8) < 0.8)
            spots = torch.arange(8 * pool.page_size).view(8, -1)[some].flatten()
            stored.append(transfer(name, spots, keys=[pages[number] for number in some]))
        assert theirs.batch_set_v2(stored) == ours.batch_set_v2(stored)
        index = transfer(names.INDEXER)
        state = transfer(names.MAMBA, keys=pages[-1 - turn % 2 :], hit_policy=trailing)
        for asked in ([index, state], [index], [state], []):
            assert theirs.batch_exists_v2(pages, asked) == ours.batch_exists_v2(pages, asked)
        for pool in pools.values():
            sglang.wiped(pool, 8)
        served = ours.batch_get_v2(stored)
        assert all(served[each.name] == [True] * len(each.keys) for each in stored)
        for each in stored:
            got = sglang.pages_of(pools[each.name], 8)
            there = [pages.index(key) for key in each.keys]
            assert all(got[number] == wanted[each.name][number] for number in there)
    short = transfer(names.KV, torch.arange(3), keys=keys(2))
    assert {names.KV: [False] * 2} == ours.batch_get_v2([short])


def test_damage_is_a_miss_of_its_page_and_is_never_found_again(sglang, opened, kv, held, tmp_path):
    (storage, wanted), [pool] = held, kv.values()
    storage.close()
    data = max(files_of(tmp_path / "kv"), key=lambda each: each.stat().st_size)
    with data.open("r+b") as file:  # a page in the middle of a record
        file.seek(data.stat().st_size // 2)
        file.write(bytes(4096))
    storage = opened(kv)
    sglang.wiped(pool, COUNT)
    served = storage.batch_get_v1(keys(), slots())
    [lost] = [number for number in range(COUNT) if not served[number]]
    assert lost == storage.batch_exists(keys()), "nobody finds it again"
    got = sglang.pages_of(pool, COUNT)
    assert all(got[number] == wanted[number] for number in range(COUNT) if number != lost)
    assert wanted == sglang.filled(pool, COUNT)
    assert all(storage.batch_set_v1(keys(), slots()))
    assert COUNT == storage.batch_exists(keys()), "stored anew"


def test_it_is_bounded_and_a_continuation_leaves_before_its_front(
    sglang, opened, kv, tmp_path, monkeypatch
):
    monkeypatch.setattr("cachesvc.offload.NUM_SHARDS", 1)  # each has an order of its own
    sglang.filled(kv[sglang.types.PoolName.KV], 24)
    storage, context = (
        opened(kv, options={"num_bytes": "16MiB"}),
        partial(sglang.types.HiCacheStorageExtraInfo),
    )
    front, tail = keys(8), keys(8, first=8)
    assert all(storage.batch_set_v1(front, slots(8), context(prefix_keys=[])))
    assert all(storage.batch_set_v1(tail, slots(8, 8), context(prefix_keys=front)))
    left = []
    for first in range(1000, 1200, 4):
        assert all(storage.batch_set_v1(keys(4, first=first), slots(4, 16)))
        left.append(storage.batch_exists(front + tail))
        assert sum(map(storage.exists, front + tail)) == left[-1], "what is left is its front"
    assert any(0 < each < 16 for each in left) and 0 == left[-1]
    assert sum(each.stat().st_blocks * 512 for each in files_of(tmp_path / "kv")) <= 16 << 20


def test_a_set_that_meets_a_full_disk_says_so_and_leaves_a_usable_front(opened, kv, monkeypatch):
    faulty = FaultyStorage(error=partial(OSError, 28, "No space left on device"))
    monkeypatch.setattr("cachesvc.offload.open_disk", partial(open_disk, storage=faulty))
    storage = opened(kv)
    assert all(storage.batch_set_v1(keys(4), slots(4)))
    faulty.arm(1, count=10_000, operations=["commit"])
    assert [True] * 4 + [False] * 4 == storage.batch_set_v1(keys(8), slots(8))
    assert 4 == storage.batch_exists(keys())
    faulty.arm(0)
    assert all(storage.batch_set_v1(keys(), slots()))
    assert COUNT == storage.batch_exists(keys())


def test_a_disk_that_hangs_holds_nothing_and_ends_no_call_that_moves_pages(held, monkeypatch):
    monkeypatch.setattr("cachesvc.sglang.storage.LOOKUP_S", 0.2)
    storage, _ = held
    answers, reads, done = threading.Event(), threading.Event(), []
    [(tier, _)] = storage._pools["kv"].parts
    find, read = tier.held, tier.load
    monkeypatch.setattr(tier, "held", lambda asked: answers.wait() and find(asked))
    monkeypatch.setattr(tier, "load", lambda *to: (reads.set(), answers.wait(), read(*to))[2])
    assert 0 == storage.batch_exists(keys()) == storage.batch_exists(keys())
    loads = threading.Thread(target=lambda: done.append(storage.batch_get_v1(keys(), slots())))
    loads.start()
    assert reads.wait(30)
    assert not done, "the disk may still write to its slots"
    answers.set()
    loads.join()
    assert [[True] * COUNT] == done
    storage._lookups.submit(lambda: None).result()
    assert COUNT == storage.batch_exists(keys())


def test_killed_while_it_writes_it_serves_what_was_stored(sglang, opened, kv, model, tmp_path):
    program = [sys.executable, "-m", "tests.sglang.pools", CLASSES, model, tmp_path / "kv"]
    root, [pool] = Path(__file__).parents[2], kv.values()
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        told = [child.stdout.readline() for _ in range(5)]
        with pytest.raises(DirectoryLocked, match="dir of its own"):
            opened(kv)
        child.kill()
        told += child.stdout.readlines()
    stored = int(told[-1])
    storage = opened(kv)
    named = [f"page-{number}" for number in range(stored + 4)]
    assert stored <= storage.batch_exists(named), "what it was told is stored"
    for first in range(0, stored + 4, 4):
        wanted = sglang.filled(pool, 4, first)
        sglang.wiped(pool, 4)
        served = storage.batch_get_v1(named[first : first + 4], slots(4))
        pairs = zip(wanted, sglang.pages_of(pool, 4), served, strict=True)
        assert all(one == other or not ok for one, other, ok in pairs)


def test_pages_that_are_not_compressed_come_back_after_those_that_were(
    sglang, opened, kv, tmp_path
):
    [pool] = kv.values()
    taken = []
    for first, options in ((0, {}), (COUNT, {"compress": False}), (2 * COUNT, {})):
        storage = opened(kv, options=options)
        sglang.filled(pool, COUNT, first)
        assert all(storage.batch_set_v1(keys(first=first), slots()))
        used = storage._disk.stats()
        taken.append(used.written_bytes / (COUNT * pool.size_per_token * sglang.PAGE))
        storage.close()
    assert taken[0] < 0.8 and 1 <= taken[1] and taken[2] < 0.8
    storage = opened(kv)
    for first in range(0, 3 * COUNT, COUNT):
        wanted = sglang.filled(pool, COUNT, first)
        sglang.wiped(pool, COUNT)
        assert all(storage.batch_get_v1(keys(first=first), slots()))
        assert wanted == sglang.pages_of(pool, COUNT)


def test_latents_are_stored_by_one_rank_and_read_by_all(sglang, opened, tmp_path):
    [first, second], name = [sglang.mla() for _ in range(2)], sglang.types.PoolName.KV
    wanted = sglang.filled(first, COUNT)
    reads = opened({name: second}, latents=True, rank=1, ranks=2)
    assert (0, [False] * COUNT) == (reads.batch_exists(keys()), reads.batch_get_v1(keys(), slots()))
    writes = opened({name: first}, latents=True, rank=0, ranks=2)
    for start in range(0, 2 * COUNT, COUNT):
        assert all(writes.batch_set_v1(keys(first=start), slots()))
        assert COUNT == reads.batch_exists(keys(COUNT + 1, first=start))
        sglang.wiped(second, COUNT)
        assert all(reads.batch_get_v1(keys(first=start), slots()))
        assert wanted == sglang.pages_of(second, COUNT)
    assert all(reads.batch_set_v1(keys(first=500), slots())), "not this rank's to store"
    assert 0 == writes.batch_exists(keys(first=500))
    assert ["dp0-pp0-cp0"] == [each.name for each in (tmp_path / "kv").iterdir()]
    reads.clear()
    assert COUNT == writes.batch_exists(keys())
    writes.close()
    more = opened({name: first}, latents=True, rank=0, ranks=4)
    assert 0 == more.batch_exists(keys()), "sums of more ranks differ in bits"


def test_ranks_that_split_heads_have_pages_of_their_own(opened, kv, tmp_path):
    ranks = [opened(kv, rank=rank, ranks=2) for rank in range(2)]
    assert all(ranks[0].batch_set_v1(keys(), slots()))
    assert [COUNT, 0] == [each.batch_exists(keys()) for each in ranks]
    names = {each.name for each in (tmp_path / "kv").iterdir()}
    assert {"dp0-tp0-pp0-cp0", "dp0-tp1-pp0-cp0"} == names
    ranks[0].close()
    assert 0 == opened(kv, rank=0, ranks=4).batch_exists(keys()), "other heads"


@pytest.mark.parametrize("what", ["files", "arguments", "bits", "dtype", "scope"])
def test_pages_of_another_model_or_setting_are_not_found(sglang, opened, kv, held, model, what):
    held[0].close()
    pools, options = kv, {}
    if what == "files":
        (model / "config.json").write_text('{"rope_theta": 1}')
        sglang.serves(model.rename(model.with_name("other")))
    if what == "arguments":
        sglang.serves(model, json_model_override_args='{"rope_theta": 1}')
    if what == "bits":  # both kinds are bytes to the pool
        sglang.serves(model, kv_cache_dtype="fp8_e5m2")
    if what == "dtype":
        pools = {sglang.types.PoolName.KV: sglang.mha(dtype=torch.float16)}
    if what == "scope":
        options = {"scope": "long"}
    other = opened(pools, options=options)
    assert 0 == other.batch_exists(keys())
    other.clear()
    other.close()
    if what == "scope":
        again = opened(kv)
        assert COUNT == again.batch_exists(keys()), "another's clear leaves it"
        again.clear()
        assert 0 == again.batch_exists(keys())


def test_pages_of_weights_that_were_changed_in_place_are_found_until_the_next_change(
    sglang, opened, kv, held, model
):
    storage, _ = held
    for version in ("two", "three"):
        sglang.serves(model, weights=version)
        assert 0 == storage.batch_exists(keys())
        assert all(storage.batch_set_v1(keys(), slots()))
        assert COUNT == storage.batch_exists(keys())
    storage.close()
    storage = opened(kv)
    assert 0 == storage.batch_exists(keys()), "although it is opened again"
    storage.close()
    sglang.serves(model)
    assert COUNT == opened(kv).batch_exists(keys()), "those of the files"


def test_what_cannot_be_kept_is_refused_by_name(sglang, opened, kv, tmp_path):
    def refuses(told, pools=kv, error=ValueError, **more):
        with pytest.raises(error, match=told):
            opened(pools, **more)

    refuses("knows no root_dir", options={"root_dir": "x"})
    refuses("is not a size", options={"num_bytes": "much"})
    refuses("compress is true or false", options={"compress": "no"})
    refuses("interface_v1", options={"interface_v1": 0})
    refuses("tp_lcm_size", should_split_heads=True)
    name, state = sglang.types.PoolName.KV, sglang.types.PoolName.MAMBA
    for layout in ("layer_first", "page_head"):
        refuses("--hicache-mem-layout page_first", {name: sglang.mha(layout)})
    refuses("has no bytes", {name: sglang.LogicalHostPool(640, 64, "page_first")})
    both = {name: sglang.mla(), state: sglang.mamba()}
    refuses("states of each rank", both, latents=True, ranks=2)
    with pytest.raises(NotImplementedError, match="in place"):
        opened(kv).batch_set(keys(1), [None])
    sglang.serves("no/such-model")
    refuses("no/such-model")


def test_its_statistics_have_the_fields_of_sglangs_own(held):
    storage, _ = held
    assert all(storage.batch_get_v1(keys(), slots()))
    told = storage.get_stats()
    source = (CLASSES / "sglang/srt/observability/metrics_collector.py").read_text()
    classes = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)]
    [theirs] = [each for each in classes if each.name == "StorageMetrics"]
    assert [line.target.id for line in theirs.body] == [each.name for each in fields(told)]
    assert ([COUNT], [COUNT]) == (told.prefetch_pgs, told.backup_pgs)
    assert 0 < min(told.prefetch_bandwidth + told.backup_bandwidth)
    assert [] == storage.get_stats().backup_pgs
