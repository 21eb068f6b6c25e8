"""Finds the owners of blocks from a data directory alone.

A scope's root is a digest that names nobody. At its start the server records the scopes of its
models, which are not secret. With the server's secret, a command derives the root of any tenant
from them.
"""

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from api.access.auth import Salts
from cachesvc.operator.secret import has_secret, read_secret
from tiers.blocks.keys import CacheScope, PrefixKey

if TYPE_CHECKING:
    from api.served_model import ServedModel

FILE_NAME = "scopes.json"
DAMAGED = f"{FILE_NAME}.damaged"  # how the names of those that were set aside begin

logger = logging.getLogger(__name__)


class ScopeKind(StrEnum):
    TENANT = "tenant"
    GROUP = "group"


class Payer(NamedTuple):
    """The tenant that pays for a scope's pins, and the model whose price applies."""

    tenant: str
    model: str


class _Recorded(NamedTuple):
    """A model's name, and its scope without a tenant's salt."""

    model: str
    scope: CacheScope


MAX_OTHERS = 4  # arithmetics that a miss is looked up under
MAX_SCOPES = 200  # of models served over time; the oldest are dropped


def note_scopes(data_dir: Path, models: "Iterable[ServedModel]") -> None:
    """Adds the scopes of these models, without a tenant's salt, to the directory's list.

    A damaged list is set aside, because it would be overwritten. Until somebody has removed that
    file, each start says what cannot be found.
    """
    path = data_dir / FILE_NAME
    known, wrong = _read(path)
    if wrong:
        path.replace(data_dir / f"{DAMAGED}-{time.time_ns()}")
    for model in models:
        recorded = _Recorded(model.name, model.scope)
        known = [each for each in known if each.scope != recorded.scope]
        known.append(recorded)
    fresh = path.with_name(f"{FILE_NAME}.new")
    with fresh.open("w") as file:
        json.dump([_json(each) for each in known[-MAX_SCOPES:]], file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    if damage := find_damage(data_dir):
        logger.error(f"{damage.message}; {damage.fix}")


class Damage(NamedTuple):
    """What is damaged and what that means, and what to do."""

    message: str
    fix: str


def find_damage(data_dir: Path) -> Damage | None:
    """Whether the list, or one that was set aside, cannot be read. Then a purge cannot find all
    blocks of a tenant."""
    path = data_dir / FILE_NAME
    _, wrong = _read(path)
    aside = sorted(data_dir.glob(f"{DAMAGED}-*"))
    lost = "the models that it listed are unknown, so blocks of theirs cannot be found by tenant"
    if wrong:
        return Damage(
            f"{path} is damaged ({wrong}): {lost}, and no tenant is purged",
            "restore it from a backup; the next start sets it aside otherwise",
        )
    if aside:
        names = ", ".join(map(str, aside))
        return Damage(
            f"the list of served models was damaged ({names}): {lost}, and no tenant is purged",
            f"stop the server, and restore {path} from a backup or remove the data directory's "
            f"disk and checkpoints; then remove {names}, and start it",
        )
    return None


def other_arithmetics(data_dir: Path, scope: CacheScope) -> tuple[bytes, ...]:
    """The arithmetics of earlier runs with the weights of `scope`, newest first. Their blocks are
    not served."""
    known, _ = _read(data_dir / FILE_NAME)
    same = [each.scope for each in reversed(known) if each.scope.weights == scope.weights]
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
    for model, scope in _read(data_dir / FILE_NAME)[0]:
        for kind in kinds or ScopeKind:
            roots[replace(scope, tenant=salt_of(salts, name, kind)).root()] = model
    return roots


def salt_of(salts: Salts, name: str, kind: ScopeKind) -> bytes:
    return salts.of_tenant(name) if kind is ScopeKind.TENANT else salts.group_salt(name)


def payers(data_dir: Path, tenants: Iterable[str]) -> dict[PrefixKey, Payer]:
    """The payer for each scope. Nobody pays for a sharing group's scopes."""
    return {
        root: Payer(tenant, model)
        for tenant in tenants
        for root, model in roots_of(data_dir, tenant, ScopeKind.TENANT).items()
    }


def _read(path: Path) -> tuple[list[_Recorded], str]:
    """The recorded scopes, and why others cannot be read; empty if all can."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [], ""
    except (OSError, ValueError) as error:
        return [], str(error)
    if not isinstance(listed, list):
        return [], "it holds no list"
    known, wrong = [], ""
    for number, each in enumerate(listed):
        try:
            known.append(_recorded(each))
        except (KeyError, TypeError, ValueError, AttributeError):
            wrong = f"entry {number} is no scope of a model"
    return known, wrong


def _recorded(given: Any) -> _Recorded:
    fields = {name: bytes.fromhex(value) for name, value in given["scope"].items()}
    return _Recorded(str(given["model"]), CacheScope(**fields))


def _json(recorded: _Recorded) -> dict[str, Any]:
    fields = {name: value.hex() for name, value in asdict(recorded.scope).items()}
    return {"model": recorded.model, "scope": fields}
