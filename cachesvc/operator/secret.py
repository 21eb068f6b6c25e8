"""The server's secret, from which salts are derived."""

import secrets
from pathlib import Path

from billing import secret_file
from cachesvc.config.errors import ConfigError

SECRET_NAME = "secret"  # noqa: S105  the file's name, not the secret
SECRET_BYTES = 32


def has_secret(data_dir: Path) -> bool:
    """Whether a server was ever started on this directory. Creates no secret."""
    return (data_dir / SECRET_NAME).exists()


def read_secret(data_dir: Path) -> bytes:
    """The server's secret, created at the first start.

    Blocks on disk are found only with the secret under which they were stored. Raises ConfigError
    for a malformed file.
    """
    path = data_dir / SECRET_NAME
    held = secret_file.read_or_make(
        path, lambda: f"{secrets.token_hex(SECRET_BYTES)}\n".encode("ascii")
    )
    try:
        secret = bytes.fromhex(held.decode("ascii").strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{path} does not hold {SECRET_BYTES} bytes in hex; restore it from a copy, or remove "
            "it: a new one is made, under which nothing that is on disk now is found"
        )
    return secret
