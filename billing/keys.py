"""API keys: their form, their digests and their owners. Pure.

A key is `sk-` and 256 random bits. It cannot be guessed, so a keyed BLAKE2b digest is enough, and a
check takes a microsecond. The store has the digest and a recognisable prefix, never the key.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

PREFIX = "sk-"
CHARS = len(PREFIX) + 43  # 256 bits in base64
SHOWN = len(PREFIX) + 8


class Scope(StrEnum):
    """What a key may do."""

    INFERENCE = "inference"
    USAGE = "usage"  # read usage and balance of its own tenant
    READ = "read"  # look at everything, of every tenant
    ADMIN = "admin"  # and change it


DEFAULT_SCOPES = frozenset({Scope.INFERENCE, Scope.USAGE})


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request. `key_id` is empty in open mode."""

    tenant: str
    project: str = ""
    key_id: str = ""
    scopes: frozenset[Scope] = DEFAULT_SCOPES
    currency: str = ""
    key_name: str = ""

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key as admins see it: everything but the key."""

    key_id: str
    tenant: str
    project: str
    name: str
    prefix: str
    scopes: frozenset[Scope]
    created_ns: int
    expires_ns: int | None
    revoked_ns: int | None


def new_key() -> str:
    """A new key, to be shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def is_key(text: str) -> bool:
    """Whether it has a key's form, which no client library's placeholder has."""
    return len(text) == CHARS and text.startswith(PREFIX)


def key_digest(secret: bytes, key: str) -> bytes:
    """The stored digest of a key. `secret` (32 to 64 bytes) is the database's own."""
    return hashlib.blake2b(key.encode(), key=secret, digest_size=32).digest()


def parse_scopes(text: str) -> frozenset[Scope]:
    """The scopes in a comma-separated text. Raises `ValueError`, naming an unknown one."""
    return frozenset(Scope(part.strip()) for part in text.split(",") if part.strip())


def format_scopes(scopes: frozenset[Scope]) -> str:
    return ",".join(scope for scope in Scope if scope in scopes)


def key_of(row: Mapping[Any, Any]) -> KeyInfo:
    """The key in a row."""
    values = {field.name: row[field.name] for field in fields(KeyInfo)}
    return KeyInfo(**values | {"scopes": parse_scopes(row["scopes"])})
