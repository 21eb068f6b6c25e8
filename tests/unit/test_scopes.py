"""The list of served models, by which a tenant's blocks are found, counted and purged, and what a
damaged one costs."""

import json
import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from api.access.auth import Salts
from api.cache.owners import Owner, Owners
from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import CacheSection
from cachesvc.operator import scopes
from cachesvc.operator.purge import purge_unserved, roots_to_purge, together
from cachesvc.operator.quotas import QuotaBook
from cachesvc.operator.scopes import FILE_NAME, ScopeKind, find_damage, note_scopes, roots_of
from cachesvc.operator.secret import read_secret
from tests.support.disks import CAPACITY, blocks, store
from tests.support.faulty_storage import LAYOUT, SCOPE
from tests.support.wire import byte_model
from tiers.disk.directory import note_elsewhere
from tiers.disk.open import open_disk
from tiers.errors import PurgeFailed
from tiers.operations.purge import Purged
from tiers.policy.quota import COMMON
from tiers.tier import Removed, TierName


def start(data_dir: Path) -> None:
    """What a start does with the list."""
    read_secret(data_dir)
    note_scopes(data_dir, [byte_model()])


def set_aside(data_dir: Path) -> list[str]:
    return [each.read_text() for each in data_dir.glob(f"{scopes.DAMAGED}-*")]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("", "Expecting value"),
        ('[\n {"model": "a", "sco', "Unterminated string"),
        ("{}", "it holds no list"),
        ('[1, {"model": "a"}]', "entry 1 is no scope of a model"),
        ('[{"model": "a", "scope": {"weights": "no hex"}}]', "entry 0 is no scope"),
        ('[{"model": "a", "scope": {"unheard of": "00"}}]', "entry 0 is no scope"),
        ('[{"model": "a", "scope": []}]', "entry 0 is no scope"),
    ],
)
def test_a_damaged_list_is_kept_and_said_until_somebody_removes_it(tmp_path, caplog, written, says):
    start(tmp_path)
    assert not caplog.messages and find_damage(tmp_path) is None
    path = tmp_path / FILE_NAME
    path.write_text(written)
    found = find_damage(tmp_path)
    assert found is not None and f"{path} is damaged ({says}" in found.message
    for _ in range(2):
        caplog.clear()
        start(tmp_path)
        assert [logging.ERROR] == [each.levelno for each in caplog.records]
        assert f"{scopes.DAMAGED}-" in caplog.text and "restore" in caplog.text
    assert [written] == set_aside(tmp_path)
    found = find_damage(tmp_path)
    assert found is not None and "was damaged" in found.message
    assert "remove the data directory's disk and checkpoints" in found.fix
    assert roots_of(tmp_path, "acme"), "the served model is known"
    with pytest.raises(PurgeFailed, match="no tenant is purged"):
        roots_to_purge(tmp_path, "acme", ScopeKind.TENANT)
    next(tmp_path.glob(f"{scopes.DAMAGED}-*")).unlink()
    assert roots_to_purge(tmp_path, "acme", ScopeKind.TENANT)
    assert find_damage(tmp_path) is None


def test_what_can_be_read_of_a_damaged_list_stays_in_use(tmp_path):
    start(tmp_path)
    path = tmp_path / FILE_NAME
    (known,) = json.loads(path.read_text())
    earlier = known | {"model": "earlier", "scope": known["scope"] | {"weights": "ab"}}
    path.write_text(json.dumps([{}, earlier]))
    assert ["earlier"] == [*roots_of(tmp_path, "acme", ScopeKind.TENANT).values()]
    start(tmp_path)
    assert ["earlier", known["model"]] == [*roots_of(tmp_path, "acme", ScopeKind.TENANT).values()]


def test_a_second_damage_does_not_replace_what_the_first_left(tmp_path):
    for written in ("first", "second"):
        (tmp_path / FILE_NAME).write_text(written)
        start(tmp_path)
    assert {"first", "second"} == set(set_aside(tmp_path))


def test_roots_of_tenants_groups_and_adapters_are_told_apart():
    base = byte_model()
    adapter = replace(byte_model("tuned"), scope=replace(base.scope, adapter=b"a"))
    salts = Salts(b"secret", {"public": frozenset({"acme"})})
    tenants = {"acme": "USD"}
    owners = Owners({each.name: each for each in (base, adapter)}, salts, lambda: tenants)
    acme, tuned = (replace(each.scope, tenant=salts.of_tenant("acme")) for each in (base, adapter))
    group = replace(adapter.scope, tenant=salts.of_group("public", "acme")).root()
    assert Owner("acme", "bytes") == owners.by_root()[acme.root()]
    assert Owner("public", "tuned", is_group=True) == owners.by_root()[group]
    assert {acme.root(), tuned.root()} == set(owners.roots_of("acme"))
    tenants["later"] = "CNY"
    assert 6 == len(owners.by_root())


ROOTS = [SCOPE.root()]


def opened(folder):
    return closing(open_disk(folder, LAYOUT, CAPACITY))


def fill_disk(folder):
    with opened(folder) as disk:
        store(disk, blocks(count=16))


def removed(data_dir):
    """How many blocks of each folder a purge takes."""
    return [done.removed["disk"].num_blocks for done in purge_unserved(data_dir, ROOTS)]


def test_a_purge_names_what_it_cannot_reach(tmp_path):
    disk, group = tmp_path / "disk", tmp_path / "checkpoints"
    fill_disk(disk)
    note_elsewhere(disk, "redis://host:1/0")
    with pytest.raises(PurgeFailed, match="also blocks in redis://host:1/0; serve from"):
        purge_unserved(tmp_path, ROOTS)
    note_elsewhere(disk, None, [group])
    with pytest.raises(PurgeFailed, match="checkpoints cannot be read, so its blocks"):
        purge_unserved(tmp_path, ROOTS)
    fill_disk(group)
    (done,) = purge_unserved(tmp_path, ROOTS)
    assert (done.removed["disk"].num_blocks, done.num_left) == (16, 0)
    assert 16 == done.checkpoints["disk"].num_blocks


def test_several_purges_of_the_same_scopes_are_one():
    """A block that any of them left is no purge."""
    ours, rest = (
        Purged(tuple(ROOTS), {tier: Removed(2, 10)}, 1, (tier,), left)
        for tier, left in ((TierName.HOST, 0), (TierName.DISK, 3))
    )
    every = together(ours, [rest, rest])
    assert {TierName.HOST: Removed(2, 10), TierName.DISK: Removed(4, 20)} == every.removed
    assert (("host", "disk", "disk"), 6, 1) == (every.pins, every.num_left, every.in_use)


def test_a_purge_reaches_the_folders_of_a_node_that_has_stopped(tmp_path):
    """An engine over a node leaves a folder for each layout in the server's disk."""
    folders = [tmp_path / "disk" / "node" / name for name in ("one", "two")]
    for folder in folders:
        fill_disk(folder)
    assert [16, 16] == removed(tmp_path)
    with opened(folders[0]) as disk:
        store(disk, blocks(count=16))
        assert [0] == removed(tmp_path)
    assert [16, 0] == removed(tmp_path)


MIB = 1 << 20
SIZES = {"device_bytes": 100 * MIB, "host_bytes": 300 * MIB, "disk_bytes": 600 * MIB}


def test_every_scope_of_a_tenant_is_in_its_group(tmp_path):
    section = CacheSection(**SIZES, quotas={"acme": 100 * MIB, "group:house": 50 * MIB})
    salts, model = Salts(read_secret(tmp_path)), byte_model()
    adapted = replace(model, name="adapted", scope=replace(model.scope, adapter=b"digest"))
    book = QuotaBook(section, tmp_path)
    book.add(salts, [model, adapted])
    note_scopes(tmp_path, [model, adapted])
    later = QuotaBook(section, tmp_path)  # of an earlier run, before any model is loaded
    for shares in (book.shares, later.shares):
        for scope in (model.scope, adapted.scope):
            mine = replace(scope, tenant=salts.of_tenant("acme")).root()
            groups = replace(scope, tenant=salts.group_salt("house")).root()
            other = replace(scope, tenant=salts.of_tenant("house")).root()
            assert shares.group(mine) == "tenant:acme"
            assert shares.group(groups) == "group:house"
            assert shares.group(other) is COMMON
    assert book.shares.share("tenant:acme") == 0.1


def test_a_scope_without_a_quota_of_its_own_gets_the_default(tmp_path):
    shares = QuotaBook(CacheSection(**SIZES, quotas={"*": 400 * MIB}), tmp_path).shares
    roots = [bytes([number]) * 16 for number in range(3)]
    assert [shares.group(root) is COMMON for root in roots] == [False, False, True]


def test_without_quotas_there_are_no_shares_and_too_many_are_refused(tmp_path):
    assert QuotaBook(CacheSection(**SIZES), tmp_path).shares is None
    with pytest.raises(ConfigError, match="promise 1153433600 bytes"):
        QuotaBook(CacheSection(**SIZES, quotas={"a": 500 * MIB, "b": 600 * MIB}), tmp_path)
