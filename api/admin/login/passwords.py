"""The admins who log in with a password, in a file of the data directory, hashed with argon2id.

The command line writes the file and the server reads it again when it changes, so a new password
works at once. Only its owner can read the file. Any thread. A check takes 64 MiB and some tens of
milliseconds, on purpose.
"""

import json
import logging
import os
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from argon2.low_level import ARGON2_VERSION

from api.admin.login.sessions import Admin, Role
from api.errors import InvalidRequest
from billing.names import check_name

FILE_NAME = "admins.json"
MIN_LENGTH = 12  # NIST SP 800-63B asks for 8 where a second factor guards, 15 where none does
MAX_LENGTH = 1024

logger = logging.getLogger(__name__)

_hasher = PasswordHasher()  # argon2id, RFC 9106's second choice: 64 MiB, 3 passes, 4 lanes


@dataclass(frozen=True, slots=True)
class _Entry:
    role: str
    hash: str


class Passwords:
    """The admins who have a password. Every call reads the file: it is small and calls are rare."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE_NAME
        self._nobody = _unreachable()

    def verify(self, name: str, password: str) -> Admin | None:
        """The admin with this name and password, if any. An unknown name takes as long as a wrong
        password. Nobody is, where the file is damaged; the log says so."""
        try:
            entry = self._entries().get(name)
        except InvalidRequest as error:
            logger.error("%s", error)
            entry = None
        try:
            _hasher.verify(entry.hash if entry else self._nobody, password[:MAX_LENGTH])
        except (VerificationError, InvalidHashError):
            return None
        return Admin(name, Role(entry.role)) if entry else None

    def set(self, name: str, password: str, role: Role) -> None:
        """Add a name or change its password and role. Raises InvalidName and InvalidRequest."""
        check_name(name, "admin")
        if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
            raise InvalidRequest(
                f"the password has {len(password)} characters; use {MIN_LENGTH} to {MAX_LENGTH}, "
                "such as four or five words that have nothing to do with each other"
            )
        self._write({**self._entries(), name: _Entry(role.value, _hasher.hash(password))})

    def remove(self, name: str) -> bool:
        """Remove a name. Returns whether it existed."""
        entries = dict(self._entries())
        found = entries.pop(name, None)
        self._write(entries)
        return found is not None

    def roles(self) -> Mapping[str, Role]:
        return {name: Role(entry.role) for name, entry in self._entries().items()}

    def _entries(self) -> Mapping[str, _Entry]:
        """Raises InvalidRequest for a damaged file."""
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            return {name: _Entry(Role(each["role"]), each["hash"]) for name, each in stored.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InvalidRequest(
                f"{self._path} is damaged: restore it from a copy, or remove it and set each "
                "password again"
            ) from None

    def _write(self, entries: Mapping[str, _Entry]) -> None:
        fresh = self._path.with_name(f"{FILE_NAME}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        fresh.touch(mode=0o600)
        stored = {name: asdict(entry) for name, entry in entries.items()}
        fresh.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self._path)


def _unreachable() -> str:
    """A hash that takes as long to check as any other. No password is known to have it: its bytes
    are random, and so a start need not compute one."""
    cost = f"m={_hasher.memory_cost},t={_hasher.time_cost},p={_hasher.parallelism}"
    salt, digest = (
        b64encode(os.urandom(size)).decode().rstrip("=")
        for size in (_hasher.salt_len, _hasher.hash_len)
    )
    return f"$argon2id$v={ARGON2_VERSION}${cost}${salt}${digest}"
