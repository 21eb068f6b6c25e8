"""The owners of blocks, from a data directory alone: the scopes that were served from it.

A scope's root is a digest and names nobody. The server notes the scopes of its models, which are no
secret; with the server's own secret a command derives from them the root of any tenant. Written
at the start, read by commands.
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


class Kind(StrEnum):
    """Who can have blocks under a name."""

    TENANT = "tenant"
    GROUP = "group"


class Payer(NamedTuple):
    """Who pays for a scope's pins, and whose price it is."""

    tenant: str
    model: str


class Scoped(Protocol):
    """A served model, as far as its scope goes."""

    @property
    def name(self) -> str: ...

    @property
    def scope(self) -> CacheScope: ...


MAX_SCOPES = 200  # of models that were served one after the other; the oldest are forgotten


def note_scopes(data_dir: Path, models: Iterable[Scoped]) -> None:
    """Add the scopes of these models, which lack a tenant's salt, to the directory's list."""
    path = data_dir / FILE_NAME
    known = _read(path)
    for model in models:
        fields = {name: value.hex() for name, value in asdict(model.scope).items()}
        known = [each for each in known if each["scope"] != fields]
        known.append({"model": model.name, "scope": fields})
    fresh = path.with_name(f"{FILE_NAME}.new")
    fresh.write_text(json.dumps(known[-MAX_SCOPES:], indent=1) + "\n")
    fresh.replace(path)


def roots_of(data_dir: Path, name: str, *kinds: Kind) -> Mapping[PrefixKey, str]:
    """The roots under which blocks of a tenant or sharing group may lie, and the model of each.

    Without `kinds`, of both.
    """
    if not has_secret(data_dir):
        return {}
    salts = Salts(read_secret(data_dir))
    roots: dict[PrefixKey, str] = {}
    for each in _read(data_dir / FILE_NAME):
        fields = {name: bytes.fromhex(value) for name, value in each["scope"].items()}
        scope = CacheScope(**fields)
        for kind in kinds or Kind:
            salt = salts.of_tenant(name) if kind is Kind.TENANT else salts.group_salt(name)
            roots[replace(scope, tenant=salt).root()] = each["model"]
    return roots


def payers(data_dir: Path, tenants: Iterable[str]) -> dict[PrefixKey, Payer]:
    """Who pays for storage in a scope; a sharing group's scopes belong to no tenant."""
    return {
        root: Payer(tenant, model)
        for tenant in tenants
        for root, model in roots_of(data_dir, tenant, Kind.TENANT).items()
    }


def _read(path: Path) -> list[dict[str, Any]]:
    """What was noted; nothing where there is no list, or none that this version reads."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return known if isinstance(known, list) else []
