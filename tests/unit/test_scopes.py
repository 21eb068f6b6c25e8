"""The list of served models, by which a tenant's blocks are found, and what a damaged one costs."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from api.access.auth import Salts
from api.cache.owners import Owner, Owners
from cachesvc.operator import scopes
from cachesvc.operator.purge import roots_to_purge
from cachesvc.operator.scopes import FILE_NAME, ScopeKind, find_damage, note_scopes, roots_of
from cachesvc.operator.secret import read_secret
from tests.support.wire import byte_model
from tiers.errors import PurgeFailed


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
