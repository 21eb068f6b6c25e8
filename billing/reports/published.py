"""The public keys for receipts, as published by a data directory.

Separate from signing, so that reading the file needs no cryptography library.
"""

from pathlib import Path

PUBLIC_FILE = "receipt_keys"  # one line per key: its id, and the key in hex


def published_keys(data_dir: Path) -> dict[str, str]:
    """Every public key that ever signed in a data directory: its id, and the key in hex."""
    try:
        lines = (data_dir / PUBLIC_FILE).read_text().splitlines()
    except FileNotFoundError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and len(pair[1]) == 64}
