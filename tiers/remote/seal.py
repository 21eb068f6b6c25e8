"""Encrypts remote records: AES-256-GCM under a key that only the servers have.

A sealed record is a random 12-byte nonce, the ciphertext and the tag. The object's name is
authenticated too, so that a record cannot be moved to another name.
"""

import secrets
from pathlib import Path

from tiers.errors import ConfigurationError

NONCE_BYTES = 12
KEY_BYTES = 32


class Seal:
    """Seals and opens records. Any thread."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)

    def seal(self, name: str, record: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, record, name.encode())

    def open(self, name: str, sealed: memoryview) -> bytes | None:
        """The record, or None if this key did not seal it under this name."""
        from cryptography.exceptions import InvalidTag

        try:
            nonce, rest = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
            return self._cipher.decrypt(nonce, rest, name.encode())
        except (InvalidTag, ValueError):
            return None


def read_seal(path: Path) -> Seal:
    """Make a seal from a key file with 64 hexadecimal digits. Raises ConfigurationError."""
    hint = "write one with `openssl rand -hex 32`, the same for every server"
    try:
        key = bytes.fromhex(path.read_text().strip())
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(f"the key file {path} cannot be read: {reason}; {hint}") from error
    except ValueError as error:
        raise ConfigurationError(f"the key in {path} is not hexadecimal; {hint}") from error
    if len(key) != KEY_BYTES:
        raise ConfigurationError(f"the key in {path} has {len(key)} bytes, not {KEY_BYTES}; {hint}")
    return Seal(key)
