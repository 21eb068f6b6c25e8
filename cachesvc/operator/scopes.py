"""Finds the owners of blocks from a data directory alone.

A scope's root is a digest that names nobody. At its start the server records the scopes of its
models, which are not secret. With the server's secret, a command derives the root of any tenant
from them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from api.access.auth import Salts
from cachesvc.operator.secret import has_secret, read_secret
from tiers.blocks.keys import CacheScope, PrefixKey

FILE_NAME = "scopes.json"


class ScopeKind(StrEnum):
    """The kinds of owners."""

    TENANT = "tenant"
    GROUP = "group"


class Payer(NamedTuple):
    """The tenant that pays for a scope's pins, and the model whose price applies."""

    tenant: str
    model: str


class Scoped(Protocol):
    """The part of a served model that determines its scope."""

    @property
    def name(self) -> str: ...

    @property
    def scope(self) -> CacheScope: ...


MAX_OTHERS = 4  # arithmetics that a miss is looked up under
MAX_SCOPES = 200  # of models served over time; the oldest are dropped


def note_scopes(data_dir: Path, models: Iterable[Scoped]) -> None:
    """Adds the scopes of these models, without a tenant's salt, to the directory's list."""
    path = data_dir / FILE_NAME
    known = _read(path)
    for model in models:
        fields = {name: value.hex() for name, value in asdict(model.scope).items()}
        known = [each for each in known if each["scope"] != fields]
        known.append({"model": model.name, "scope": fields})
    fresh = path.with_name(f"{FILE_NAME}.new")
    fresh.write_text(json.dumps(known[-MAX_SCOPES:], indent=1) + "\n")
    fresh.replace(path)


def other_arithmetics(data_dir: Path, scope: CacheScope) -> tuple[bytes, ...]:
    """The arithmetics of earlier runs with the weights of `scope`, newest first. Their blocks are
    not served."""
    known = [_scope(each) for each in reversed(_read(data_dir / FILE_NAME))]
    same = [each for each in known if each.weights == scope.weights]
    others = dict.fromkeys(each.arithmetic for each in same)
    return tuple(each for each in others if each != scope.arithmetic)[:MAX_OTHERS]


def roots_of(data_dir: Path, name: str, *kinds: ScopeKind) -> Mapping[PrefixKey, str]:
    """The possible roots of a tenant's or sharing group's blocks, with the model of each.

    Without `kinds`, roots of both kinds.
    """
    if not has_secret(data_dir):
        return {}
    salts = Salts(read_secret(data_dir))
    roots: dict[PrefixKey, str] = {}
    for each in _read(data_dir / FILE_NAME):
        scope = _scope(each)
        for kind in kinds or ScopeKind:
            salt = salts.of_tenant(name) if kind is ScopeKind.TENANT else salts.group_salt(name)
            roots[replace(scope, tenant=salt).root()] = each["model"]
    return roots


def payers(data_dir: Path, tenants: Iterable[str]) -> dict[PrefixKey, Payer]:
    """The payer for each scope. Nobody pays for a sharing group's scopes."""
    return {
        root: Payer(tenant, model)
        for tenant in tenants
        for root, model in roots_of(data_dir, tenant, ScopeKind.TENANT).items()
    }


def _scope(recorded: Mapping[str, Any]) -> CacheScope:
    fields = {name: bytes.fromhex(value) for name, value in recorded["scope"].items()}
    return CacheScope(**fields)


def _read(path: Path) -> list[dict[str, Any]]:
    """The recorded scopes; empty if there is no list that this version can read."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return known if isinstance(known, list) else []
