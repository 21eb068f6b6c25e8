"""The owner behind the root of a scope: a tenant or sharing group, and a model.

A root is a 16-byte digest that reveals nothing by itself. Its owner is found by deriving the roots
of all tenants and groups for all models. Reads the accounts, so it is called off the event loop.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from api.access.auth import Salts
from api.served_model import ServedModel
from tiers.blocks.keys import PrefixKey


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant or group that shares a scope's blocks, and the model or adapter.

    `currency` is the one that all of its tenants are charged in; empty if they have several.
    """

    name: str
    model: str
    is_group: bool = False
    currency: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        return f"group {self.name}" if self.is_group else self.name


class Owners:
    """Roots by owner. Each is derived once, in 5 us. Any thread."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        salts: Salts,
        tenants: Callable[[], Mapping[str, str]],  # each with its currency
    ) -> None:
        self._models = models
        self._salts = salts
        self._tenants = tenants
        self._roots: dict[Owner, PrefixKey] = {}

    def by_root(self) -> dict[PrefixKey, Owner]:
        """Every current owner, by the root of its scope."""
        return {self._root(owner): owner for owner in self._all()}

    def roots_of(self, name: str) -> list[PrefixKey]:
        """The scopes of one tenant or group, over all models."""
        return [self._root(owner) for owner in self._all() if owner.name == name]

    def _all(self) -> Iterable[Owner]:
        tenants = self._tenants()
        for model in self._models:
            for group, members in self._salts.groups.items():
                paid_in = {tenants.get(each, "") for each in members}
                shared = paid_in.pop() if len(paid_in) == 1 else ""
                yield Owner(group, model, is_group=True, currency=shared)
            for tenant, currency in tenants.items():
                yield Owner(tenant, model, currency=currency)

    def _root(self, owner: Owner) -> PrefixKey:
        root = self._roots.get(owner)
        if root is None:
            salts = self._salts
            salt = salts.group_salt(owner.name) if owner.is_group else salts.of_tenant(owner.name)
            scope = replace(self._models[owner.model].scope, tenant=salt)
            root = self._roots[owner] = scope.root()
        return root
