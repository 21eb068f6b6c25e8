"""`cachesvc cache`: what it prints of a disk tier, served or at rest, and what it refuses."""

import os
import subprocess
import sys

import lmdb
import pytest

from cachesvc.config.places import disk_path
from tests.children import ran
from tests.support.commands import said, told
from tests.support.faulty_storage import chain, put, take
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.disk.inspection.opening import open_shards
from tiers.disk.inspection.verify import verify
from tiers.disk.open import open_disk

LAYOUT = BlockLayout.uniform(
    num_layers=2, block_size=64, num_kv_heads=2, head_dim=8, dtype="float32"
)
NUM_BLOCKS = 6


PURGE = """
import pathlib, sys
from tiers.disk.inspection.maintenance import purge
from tiers.disk.inspection.opening import open_shards

with open_shards(pathlib.Path(sys.argv[1]), readonly=False) as (_, shards):
    purge(shards, [bytes.fromhex(sys.argv[2])])
"""


def in_cache(command, data_dir, *words, **how):
    return said("cache", command, *words, "--data-dir", data_dir, **how)


def store(tier, ids):
    put(tier, ids, take(FrameArena(LAYOUT, len(ids)), len(ids)))


@pytest.fixture
def ids():
    return chain(NUM_BLOCKS, block_size=LAYOUT.block_size)


@pytest.fixture
def data_dir(tmp_path, ids):
    tier = open_disk(disk_path(tmp_path), LAYOUT, 64 << 20)
    store(tier, ids)
    tier.close()
    return tmp_path


def test_stats_tell_blocks_bytes_and_that_no_server_runs(data_dir):
    found = told("cache", "stats", "--data-dir", data_dir)
    assert (NUM_BLOCKS, None) == (found["num_blocks"], found["server"])
    assert NUM_BLOCKS * LAYOUT.nbytes == found["logical_bytes"]
    assert "none running" in in_cache("stats", data_dir)


def flip_a_bit(data_dir, ids):
    with open_shards(disk_path(data_dir), readonly=True) as (_, (shard,)):
        place = shard.find([ids[2].key])[0].place
    with (shard.path / "data.mdb").open("r+b") as file:
        file.seek(place.offset + place.nbytes - 1)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))


def lose_an_order(data_dir, ids):
    shard = disk_path(data_dir) / "shard-000"
    with lmdb.open(str(shard), map_size=64 << 20, max_dbs=8) as env:
        order = env.open_db(b"order", create=False)
        with env.begin(order, write=True) as change:
            change.delete(next(change.cursor().iternext(values=False)))


@pytest.mark.parametrize(
    ("damage", "says"),
    [(flip_a_bit, "1 bad block: checksum"), (lose_an_order, "its databases disagree")],
)
def test_verify_names_what_is_wrong_fails_and_repairs_it(data_dir, ids, damage, says):
    found = told("cache", "verify", "--data-dir", data_dir)
    assert (True, NUM_BLOCKS) == (found["sound"], found["num_blocks"])
    damage(data_dir, ids)
    verified = in_cache("verify", data_dir, code=1)
    assert says in verified and "--repair" in verified
    said("cache", "verify", "--repair", "--data-dir", data_dir)
    in_cache("verify", data_dir)


def test_verify_counts_at_one_moment_beside_another_process(data_dir, ids):
    with open_shards(disk_path(data_dir), readonly=True) as (_, (shard,)):
        ran(PURGE, disk_path(data_dir), ids[0].scope.hex())
        assert NUM_BLOCKS == shard.totals.num_blocks  # as it was opened
        assert verify(shard).sound


def test_a_wrong_directory_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        assert str(path) in in_cache("stats", path, code=1)


@pytest.mark.parametrize("where", ["node", "server's node", "layout"])
def test_a_nodes_disk_is_looked_into_as_a_servers(tmp_path, ids, where):
    folder = tmp_path / "disk" / "node" if where == "server's node" else tmp_path
    mine = folder / LAYOUT.digest().hex()
    tier = open_disk(mine, LAYOUT, 64 << 20)
    store(tier, ids)
    tier.close()
    shown = told("cache", "stats", "--data-dir", mine if where == "layout" else tmp_path)
    assert (str(mine), NUM_BLOCKS) == (shown["path"], shown["num_blocks"])


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("", 2, "either --tenant or --group"),
        ("--tenant a --group b", 2, "either --tenant or --group"),
        ("--tenant acme", 2, "say why with --reason"),
        ("--tenant acme --reason left", 1, "no server runs on"),
        ("--tenant acme --database-url x", 2, "the running server purges"),
    ],
)
def test_a_purge_says_whose_and_why_and_needs_the_server(data_dir, flags, code, message):
    assert message in in_cache("purge", data_dir, *flags.split(), code=code)
    assert NUM_BLOCKS == told("cache", "stats", "--data-dir", data_dir)["num_blocks"]


def test_a_pipe_that_closes_early_is_no_damage(data_dir):
    command = (
        f"import sys; sys.argv = ['cachesvc', 'cache', 'verify', '--data-dir', {str(data_dir)!r}]"
    )
    start = f"{command}; from cachesvc.cli import main; main()"
    for line in ("", "import sys, io; sys.stdout.reconfigure(write_through=True); "):
        with subprocess.Popen(
            [sys.executable, "-c", line + start], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as running:
            assert running.stdout is not None and running.stderr is not None
            running.stdout.close()
            assert b"" == running.stderr.read()
