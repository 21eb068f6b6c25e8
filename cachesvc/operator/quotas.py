"""Maps the quotas of tenants and sharing groups to the groups that the tiers count.

The tiers know only scopes. The owner of a scope follows from the server's secret and the list of
served models. A scope whose owner has no quota belongs to the common group. With a default quota,
it is a group by itself.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from api.access.auth import Salts
from api.served_model import ServedModel
from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import CacheSection
from cachesvc.operator.scopes import ScopeKind, roots_of, salt_of
from tiers.errors import ConfigurationError
from tiers.policy.owners import ScopeOwners
from tiers.policy.quota import QuotaShares

OTHERS = "*"  # each scope without a quota of its own
GROUP = "group:"


class QuotaBook:
    """The owner of each scope. Filled before the tiers serve; read by their threads."""

    def __init__(self, cache: CacheSection, data_dir: Path) -> None:
        self._names = [_owner(name) for name in cache.quotas if name != OTHERS]
        self.owners = ScopeOwners()
        self.shares = self._shares(cache)
        for kind, name in self._names:  # models served earlier may have blocks on disk
            self.owners.learn(dict.fromkeys(roots_of(data_dir, name, kind), label(kind, name)))

    def add(self, salts: Salts, models: Iterable[ServedModel]) -> None:
        for model in models:
            for kind, name in self._names:
                root = replace(model.scope, tenant=salt_of(salts, name, kind)).root()
                self.owners.learn({root: label(kind, name)})

    def _shares(self, cache: CacheSection) -> QuotaShares | None:
        quotas: dict[Hashable, int] = dict(labelled(cache.quotas).items())
        default = quotas.pop(OTHERS, 0)
        if not quotas and not default:
            return None
        total = cache.device_bytes + cache.host_bytes + cache.disk_bytes
        try:
            return QuotaShares(total, quotas, default, self.owners.of)
        except ConfigurationError as error:
            raise ConfigError(str(error)) from None


def labelled(quotas: Mapping[str, int]) -> dict[str, int]:
    """Quotas by owner label, as in tiers and metrics; * stays as it is."""
    return {name if name == OTHERS else label(*_owner(name)): size for name, size in quotas.items()}


def _owner(name: str) -> tuple[ScopeKind, str]:
    """The owner behind a quota's name in the settings. A tenant's name has no colon."""
    if name.startswith(GROUP):
        return ScopeKind.GROUP, name.removeprefix(GROUP)
    return ScopeKind.TENANT, name


def label(kind: ScopeKind, name: str) -> str:
    """An owner's label in metrics and JSON."""
    return f"{kind}:{name}"
