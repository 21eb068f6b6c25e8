"""Who the caller is: a key becomes a `Principal`, and its tenant the salt that keeps blocks apart.

The salt is HMAC-SHA256 of the tenant's name under the server's secret. It is derived here, from
what authentication says, and never read from a request, so no client can name another tenant's
blocks. A sharing group has a salt of its own; a request joins one by name and only as a member.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from api.errors import MissingKey, MissingScope
from billing.accounts import Accounts
from billing.keys import Principal, Scope, is_key
from tiers.blocks.keys import CacheScope

MAX_DERIVED = 10_000  # salts kept in memory
EVERYONE = "*"  # as a member of a sharing group, stands for every tenant


class KeyGate:
    """Turns the Authorization header into a principal, by the accounts' keys.

    A key is needed when `required`, and always once one exists. Until then every request belongs to
    the open tenant, whatever key a client library sends. The accounts read their store on a
    worker thread. Between two reads their memory answers on the event loop.
    """

    def __init__(self, keys: Accounts, *, required: bool = False) -> None:
        self._keys = keys
        self._required = required
        self._nobody: Principal | None = None

    async def identify(self, authorization: str | None) -> Principal:
        """Raises MissingKey, UnknownKey and related errors."""
        token = bearer_token(authorization)
        known = self._recall(token)
        return known if known is not None else await asyncio.to_thread(self._look, token)

    def _recall(self, token: str | None) -> Principal | None:
        """The principal, from memory alone; None if only the store can decide, or if it is a
        refusal."""
        if not self._keys.is_fresh:
            return None
        if not (self._required or self._keys.requires_keys):
            return None if token is not None and is_key(token) else self._nobody
        return self._keys.recall(token) if token is not None else None

    def _look(self, token: str | None) -> Principal:
        if token is not None and is_key(token) and not self._keys.requires_keys:
            self._keys.refresh()  # it may be the first key, just made by another process
        if not (self._required or self._keys.requires_keys):
            self._nobody = self._nobody or self._keys.open_principal()
            return self._nobody
        if token is None:
            raise MissingKey(
                "This server needs an API key: send the header 'Authorization: Bearer KEY'. "
                "An operator makes one with `cachesvc keys create --tenant TENANT`."
            )
        return self._keys.authenticate(token)


@dataclass(frozen=True, slots=True)
class Salts:
    """Salts of tenants and sharing groups. `groups` names each group's member tenants."""

    secret: bytes = field(repr=False)
    groups: Mapping[str, frozenset[str]] = field(default_factory=dict)
    _derived: dict[tuple[bytes, str], bytes] = field(
        default_factory=dict, repr=False, compare=False
    )

    def scoped(self, scope: CacheScope, tenant: str, group: str | None = None) -> CacheScope:
        """A model's scope with the salt of a tenant, or of the sharing group that it names."""
        salt = self.of_group(group, tenant) if group else self.of_tenant(tenant)
        return replace(scope, tenant=salt)

    def of_tenant(self, tenant: str) -> bytes:
        return self._derive(b"tenant", tenant)

    def of_group(self, group: str, tenant: str) -> bytes:
        """The salt that all members share. Raises MissingScope for a tenant outside the group."""
        members = self.groups.get(group, frozenset())
        if tenant not in members and EVERYONE not in members:
            raise MissingScope(
                f"Tenant '{tenant}' is not a member of the sharing group it named; leave out "
                "cachesvc.share, or ask the operator to add the tenant to the group.",
                param="cachesvc.share",
            )
        return self.group_salt(group)

    def group_salt(self, group: str) -> bytes:
        """The same salt for the server's own use, without a membership check."""
        return self._derive(b"group", group)

    def _derive(self, kind: bytes, name: str) -> bytes:
        salt = self._derived.get((kind, name))
        if salt is None:  # OpenSSL releases the GIL here, which would stall the event loop
            salt = hmac.digest(self.secret, kind + b"\0" + name.encode(), hashlib.sha256)
            if len(self._derived) >= MAX_DERIVED:
                self._derived.clear()
            self._derived[kind, name] = salt
        return salt


def require(principal: Principal, scope: Scope) -> None:
    """Raises MissingScope, naming the command that makes a suitable key."""
    if not principal.may(scope):
        raise MissingScope(
            f"This API key lacks the scope '{scope}'; use one that has it, made with "
            f"`cachesvc keys create --tenant {principal.tenant} --scope {scope}`."
        )


def bearer_token(authorization: str | None) -> str | None:
    """The key in an `Authorization: Bearer KEY` header; None if there is no such header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None
