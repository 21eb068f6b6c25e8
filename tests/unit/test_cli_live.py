"""Commands about a running server, and what they say where none runs."""

import json
import logging
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner, Result

from api.access.auth import Salts
from api.cache.explorer import Explorer
from api.cache.owners import Owners
from billing.operations.books import OpenBooks
from billing.proof.prover import Prover
from billing.reports.receipts import ReceiptSigner
from billing.store.opening import database_url
from cachesvc.cli import app
from cachesvc.cli.cache.tree import tree_lines
from cachesvc.config.places import disk_path
from cachesvc.operator.lookups import read_blocks
from cachesvc.operator.scopes import note_scopes, roots_of
from cachesvc.operator.secret import read_secret
from tests.running_server import Running
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tests.support.admin import fake_parts
from tests.support.billing import running_ledger
from tests.support.faulty_storage import chain
from tests.support.wire import fake_house
from tests.unit.test_cli_cache import LAYOUT, store
from tiers.blocks.keys import CacheScope, token_bytes
from tiers.blocks.tree import TreeQuery, tree_json
from tiers.disk.directory import DirectoryLock
from tiers.disk.open import open_disk
from tiers.explore import DiskBlocks, TierForest
from tiers.memory.block import BlockState


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


class Growing:
    """The stats of a server that serves more from one look to the next."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self) -> dict[str, Any]:
        self.turn += 1
        n = self.turn
        tier = {"num_blocks": 7, "used_bytes": 700, "capacity_bytes": 1000}
        return {
            "time_s": 1000.0 + n,
            "model": "bytes",
            "engine": {"num_running": 2, "num_waiting": 1, "num_loading": 1},
            "cache": {
                "tiers": {
                    "device": {**tier, "hits": 10 * n, "stored": 4 * n, "evicted": 3 * n},
                    "disk": {**tier, "hits": 0, "stored": 0, "evicted": 0},
                }
            },
            "traffic": {
                "prompt_tokens": {"device": 60.0 * n, "computed": 40.0 * n},
                "generation_tokens": 5.0 * n,
            },
        }


@pytest.fixture
def data_dir(tmp_path):
    """A directory with blocks of two tenants on disk, which it knows the scopes of."""
    salts = Salts(read_secret(tmp_path))
    house = fake_house()
    (model,) = house.wire.inference.models.values()
    house.close()
    note_scopes(tmp_path, [model])
    tier = open_disk(disk_path(tmp_path), LAYOUT, 64 << 20)
    for seed, (tenant, count) in enumerate((("acme", 5), ("globex", 2))):
        scope = replace(model.scope, tenant=salts.of_tenant(tenant))
        store(tier, chain(count, block_size=LAYOUT.block_size, seed=seed, scope=scope))
    tier.close()
    return tmp_path


@pytest.fixture
def world():
    """A small engine that has served a prompt three times."""
    world = World(device_blocks=40)
    for number in range(3):
        world.submit(f"r{number}", [*range(2 * BLOCK), 40 + number], tenant=b"acme", max_tokens=1)
        world.run()
    return world


@pytest.fixture
def books(data_dir):
    """The accounts of the tenant acme alone."""
    with running_ledger(database_url(data_dir)) as house:
        store = house.accounts.store
        signer = ReceiptSigner.open(data_dir)
        yield OpenBooks(store, house.accounts, house.ledger, Prover(store), signer)


@pytest.fixture
def server(data_dir, world, books):
    def run(function: Any) -> Any:
        future = world.engine.call(function)
        world.engine.turn()
        return future

    # The server runs in this process, whose standard output the commands under test have.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    salts = Salts(read_secret(data_dir), {"handbook": frozenset({"acme"})})
    house = fake_house(salts=salts)
    owners = Owners(house.wire.inference.models, salts, lambda: {"acme": "CNY"})
    explorer = Explorer(run, owners, None, block_bytes=1)
    parts = replace(
        fake_parts(),
        stats=Growing(),
        blocks=partial(read_blocks, run),
        books=books,
        explorer=explorer,
    )
    with Running(data_dir, parts, house) as running:
        yield running


def test_without_a_server_commands_about_one_say_what_to_do(data_dir):
    failed = call("top", "--data-dir", str(data_dir))
    assert 1 == failed.exit_code
    assert f"no server runs on {data_dir}" in failed.stderr


def test_a_server_whose_file_was_removed_is_not_called_none(data_dir):
    lock = DirectoryLock(disk_path(data_dir))
    try:
        failed = call("top", "--data-dir", str(data_dir))
    finally:
        lock.release()
    assert 1 == failed.exit_code
    assert f"{data_dir} is served by pid {os.getpid()}" in failed.stderr
    assert "its server.json was removed; restart it" in failed.stderr


def test_stats_of_a_running_server_tell_every_tier(server):
    told = json.loads(call("cache", "stats", "--data-dir", str(server.data_dir), "--json").stdout)
    assert 7 == told["num_blocks"]
    assert {"device", "disk"} == told["tiers"].keys()
    shown = call("cache", "stats", "--data-dir", str(server.data_dir)).stdout
    assert "device" in shown


def test_stats_of_a_running_server_tell_who_takes_the_room(server, world):
    """By owner if a name leads to the scope, otherwise unowned. A block here is one byte."""
    told = json.loads(call("cache", "stats", "--data-dir", str(server.data_dir), "--json").stdout)
    held = {
        tier: sum(each["bytes"].get(tier, 0) for each in told["owners"])
        for tier in ("device", "host")
    }
    index = world.cache.index
    blocks = [each for each in (*index, *index.iter_partials()) if each.state is BlockState.READY]
    assert sum(block.slot is not None for block in blocks) == held["device"] > 0
    assert sum(block.frame is not None for block in blocks) == held["host"]
    shown = call("cache", "stats", "--data-dir", str(server.data_dir)).stdout
    assert [each["owner"] for each in told["owners"]] == [
        name for name in ("acme", "no tenant here") if name in shown
    ]


def test_a_tenant_that_the_server_does_not_know_is_named(server):
    flags = ("cache", "tree", "--live", "--data-dir", str(server.data_dir), "--tenant")
    failed = call(*flags, "amce")
    assert 1 == failed.exit_code
    assert "no tenant or sharing group is named 'amce'" in failed.stderr
    for known in ("acme", "handbook"):
        assert 0 == call(*flags, known).exit_code


def test_the_tree_on_disk_knows_no_tenants(data_dir):
    failed = call("cache", "tree", "--tenant", "acme", "--data-dir", str(data_dir))
    assert (2, True) == (failed.exit_code, "add --live" in failed.stderr)


def test_scopes_are_remembered_by_their_digest_and_bounded(tmp_path):
    read_secret(tmp_path)
    house = fake_house()
    (model,) = house.wire.inference.models.values()
    house.close()
    for number in range(250):
        scope = CacheScope(weights=token_bytes([number]))
        note_scopes(tmp_path, [replace(model, scope=scope)])
        note_scopes(tmp_path, [replace(model, scope=scope)])
    assert 2 * 200 == len(roots_of(tmp_path, "acme"))


def test_a_scope_is_drawn_with_its_owner(world):
    told = tree_json(TierForest(world.cache.index, DiskBlocks()).tree(TreeQuery()))
    told["scopes"][0]["owner"] = "acme"
    first = next(iter(tree_lines(told)))
    assert first.startswith("scope ") and first.endswith(" of acme")
