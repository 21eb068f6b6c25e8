"""Who is asking: a key becomes a `Caller`, and a caller the salt that keeps tenants' blocks apart.

The salt is HMAC-SHA256 of the tenant's id under the server's secret. It is derived here, from what
authentication says, and never read from a request, so no client can name another tenant's blocks.
A sharing group has a salt of its own; a request joins one by name and only as a member.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from api.errors import MissingScope

INFERENCE = "inference"
READ_USAGE = "usage"
ADMIN = "admin"
EVERYONE = "*"  # as a member of a sharing group: every tenant


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated asker. `key_id` is None on an open server."""

    tenant: str
    project: str | None = None
    key_id: str | None = None
    scopes: frozenset[str] = frozenset({INFERENCE, READ_USAGE})

    def require(self, scope: str) -> None:
        if scope not in self.scopes:
            raise MissingScope(
                f"This API key lacks the scope '{scope}'; create a key that has it with "
                f"`cachesvc keys create --tenant {self.tenant} --scope {scope}`."
            )


class Gatekeeper(Protocol):
    """Turns the Authorization header into a caller, or raises MissingKey, UnknownKey and kin."""

    async def identify(self, authorization: str | None) -> Caller: ...


@dataclass(frozen=True, slots=True)
class Salts:
    """Salts of tenants and sharing groups. `groups` names each group's member tenants."""

    secret: bytes
    groups: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def of_tenant(self, tenant: str) -> bytes:
        return self._derive(b"tenant", tenant)

    def of_group(self, group: str, tenant: str) -> bytes:
        """The salt that all members share. Raises MissingScope for any other tenant."""
        members = self.groups.get(group, frozenset())
        if tenant not in members and EVERYONE not in members:
            raise MissingScope(
                f"Tenant '{tenant}' is no member of the sharing group '{group}'; leave out "
                "cachesvc.share, or ask the operator to add the tenant to the group.",
                param="cachesvc.share",
            )
        return self._derive(b"group", group)

    def _derive(self, kind: bytes, name: str) -> bytes:
        return hmac.digest(self.secret, kind + b"\0" + name.encode(), hashlib.sha256)


def bearer_token(authorization: str | None) -> str | None:
    """The key of an `Authorization: Bearer KEY` header; None when there is none."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


class OpenGate:
    """A server without keys: every caller is the one local tenant. Such a server binds loopback."""

    def __init__(self, tenant: str = "local") -> None:
        self._caller = Caller(tenant)

    async def identify(self, authorization: str | None) -> Caller:
        return self._caller
