"""Quotas by name: settings and served models become groups of scopes."""

from dataclasses import replace

import pytest

from api.access.auth import Salts
from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import CacheSection
from cachesvc.operator.quotas import QuotaBook
from cachesvc.operator.scopes import note_scopes
from cachesvc.operator.secret import read_secret
from tests.support.wire import byte_model
from tiers.policy.quota import COMMON

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
