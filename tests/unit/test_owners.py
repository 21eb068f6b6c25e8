"""A scope's root is found again by its tenant, its group and its model."""

from dataclasses import replace

from api.access.auth import Salts
from api.cache.owners import Owner, Owners
from tests.support.wire import byte_model


def test_roots_of_tenants_groups_and_adapters_are_told_apart():
    base = byte_model()
    adapter = replace(byte_model("tuned"), scope=replace(base.scope, adapter=b"a"))
    models = {model.name: model for model in (base, adapter)}
    salts = Salts(b"secret", {"public": frozenset({"acme"})})
    tenants = {"acme": "USD"}
    owners = Owners(models, salts, lambda: tenants)
    root = replace(base.scope, tenant=salts.of_tenant("acme")).root()
    group = replace(adapter.scope, tenant=salts.of_group("public", "acme")).root()
    assert Owner("acme", "bytes") == owners.by_root()[root]
    assert Owner("public", "tuned", is_group=True) == owners.by_root()[group]
    assert {root, replace(adapter.scope, tenant=salts.of_tenant("acme")).root()} == set(
        owners.roots_of("acme")
    )
    tenants["later"] = "CNY"
    assert 6 == len(owners.by_root())
