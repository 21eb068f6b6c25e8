"""Commands about a running server, what they ask it, and what they say where none runs."""

import logging
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from api.access.auth import Salts
from api.cache.explorer import Explorer
from api.cache.owners import Owners
from billing.operations.books import OpenBooks
from billing.proof.prover import Prover
from billing.reports.receipts import ReceiptSigner, verify_receipt
from billing.store.opening import database_url
from cachesvc.cli import explain
from cachesvc.cli.cache.tree import tree_lines
from cachesvc.cli.explain import _quote_lines
from cachesvc.config.places import disk_path
from cachesvc.operator.lookups import read_blocks
from cachesvc.operator.purge import receipt
from cachesvc.operator.scopes import ScopeKind, note_scopes, roots_of
from cachesvc.operator.secret import read_secret
from tests.running_server import announcing
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tests.support.admin import fake_parts
from tests.support.billing import running_ledger
from tests.support.commands import said, told
from tests.support.faulty_storage import chain
from tests.support.wire import byte_model, fake_house
from tests.unit.test_cli_cache import LAYOUT, store
from tiers.blocks.keys import CacheScope, token_bytes
from tiers.blocks.tree import TreeQuery, tree_json
from tiers.disk.directory import DirectoryLock
from tiers.disk.open import open_disk
from tiers.explore import DiskBlocks, TierForest
from tiers.memory.block import BlockState
from tiers.tier import Purged, Removed, TierName

TIER = {"num_blocks": 7, "used_bytes": 700, "capacity_bytes": 1000, "hits": 10, "stored": 4}
STATS = {
    "time_s": 1000.0,
    "engine": {"num_running": 2, "num_waiting": 1, "num_loading": 1},
    "cache": {"tiers": dict.fromkeys(("device", "disk"), TIER | {"evicted": 3})},
}


@pytest.fixture
def data_dir(tmp_path):
    """A directory with blocks of two tenants on disk, which it knows the scopes of."""
    salts = Salts(read_secret(tmp_path))
    model = byte_model()
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
    blocks = partial(read_blocks, run)

    async def purge(kind: str, name: str, *, by: str, why: str) -> Any:
        """Says that it is done."""
        done = Purged((), {TierName.DISK: Removed(5, 70)}, 2, (), 0)
        given = {"by": by, "why": why, "started_s": 1.0}
        return receipt(books.signer, ScopeKind(kind), name, done, **given)

    shown = {"stats": lambda: STATS, "blocks": blocks, "explorer": explorer}
    parts = fake_parts(books=books, cache=SimpleNamespace(purge=purge), **shown)
    with announcing(data_dir, parts, house):
        yield data_dir


def test_a_server_whose_file_was_removed_is_not_called_none(data_dir):
    lock = DirectoryLock(disk_path(data_dir))
    try:
        told_of = said("top", "--data-dir", data_dir, code=1)
    finally:
        lock.release()
    assert f"{data_dir} is served by pid {os.getpid()}" in told_of
    assert "its server.json was removed; restart it" in told_of


def test_a_purge_asks_and_prints_the_servers_receipt(server):
    purge = ("cache", "purge", "--tenant", "acme", "--reason", "left", "--data-dir", server)
    assert "nothing was changed" in said(*purge, input="n\n", code=1)
    signed = told(*purge, "--yes")
    assert ("acme", "left", 0) == (signed["tenant"], signed["why"], signed["blocks_left"])
    assert verify_receipt(signed, ReceiptSigner.open(server).public_key)
    shown = said(*purge, "--yes")
    assert "5 blocks (70 B) of tenant acme off disk" in shown and "2 of them are in use" in shown
    assert f"signed with key {signed['key_id']}" in shown


def test_stats_of_a_running_server_tell_every_tier_and_who_takes_the_room(server, world):
    """By owner if a name leads to the scope, otherwise unowned. A block here is one byte."""
    stats = ("cache", "stats", "--data-dir", server)
    found, shown = told(*stats), said(*stats)
    assert 7 == found["num_blocks"] and "device" in shown
    assert {"device", "disk"} == found["tiers"].keys()
    owners = [each["bytes"] for each in found["owners"]]
    held = {tier: sum(each.get(tier, 0) for each in owners) for tier in ("device", "host")}
    index = world.cache.index
    blocks = [each for each in (*index, *index.iter_partials()) if each.state is BlockState.READY]
    assert sum(block.slot is not None for block in blocks) == held["device"] > 0
    assert sum(block.frame is not None for block in blocks) == held["host"]
    assert [each["owner"] for each in found["owners"]] == [
        name for name in ("acme", "no tenant here") if name in shown
    ]


def test_a_tenant_that_the_server_does_not_know_is_named(server):
    flags = ("cache", "tree", "--data-dir", server, "--tenant")
    assert "no tenant or sharing group is named 'amce'" in said(*flags, "amce", code=1)
    for known in ("acme", "handbook"):
        said(*flags, known)


def test_scopes_are_remembered_by_their_digest_and_bounded(tmp_path):
    read_secret(tmp_path)
    model = byte_model()
    scopes = [CacheScope(weights=token_bytes([number])) for number in range(250)]
    note_scopes(tmp_path, [replace(model, scope=scope) for scope in scopes for _ in range(2)])
    assert 2 * 200 == len(roots_of(tmp_path, "acme"))


def test_a_scope_is_drawn_with_its_owner(world):
    told = tree_json(TierForest(world.cache.index, DiskBlocks()).tree(TreeQuery()))
    told["scopes"][0]["owner"] = "acme"
    first = next(iter(tree_lines(told)))
    assert first.startswith("scope ") and first.endswith(" of acme")


PRICE = {"currency": "CNY", "prompt": "0.00004", "at_most": "0.00006"}
PRICE |= {"card": "deepseek-launch", "version": "2024-08-02", "window": "standard"}
QUOTE = {"prompt_tokens": 100, "hit_tokens": 64, "miss_tokens": 36, "max_output_tokens": 10}
QUOTE |= {"hit_tokens_by_tier": {"host": 16, "disk": 48}, "price": PRICE, "hits_known": True}


def test_a_quote_says_where_hits_come_from_and_what_they_cost():
    first, price = _quote_lines(QUOTE)
    assert "100 tokens: 64 would hit (16 from host, 48 from disk), 36 would be computed" == first
    assert "0.00004 CNY for the prompt, at most 0.00006 with 10 tokens" in price
    assert "; at most 36 would be computed" in _quote_lines(QUOTE | {"hits_known": False})[0]


@pytest.mark.parametrize("name", ["mistyped.json", "/nowhere/body"])
def test_a_file_that_does_not_exist_is_no_id(name):
    assert f"error: there is no file {name}" == said("explain", name, code=1)


def test_a_file_is_a_request_that_was_not_sent_and_else_it_is_an_id(tmp_path, monkeypatch):
    file, asked = tmp_path / "request.json", []
    file.write_text('{"prompt": "hi"}')

    def answer(*sent):
        asked.append(sent)
        return {}

    running = SimpleNamespace(get=answer, post=answer)
    monkeypatch.setattr(explain, "running_server", lambda _: running)
    for argument in ("cmpl-1", file):
        told("explain", argument)
    body = {"tenant": "default", "request": {"prompt": "hi"}}
    assert [("/admin/api/requests/cmpl-1",), ("/admin/api/cache/quote", body)] == asked
