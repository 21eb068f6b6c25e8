"""Stores signed heads of the ledger in a file, at a URL, or in a bucket.

A file or a URL gets a line each time, a bucket an object. No object is written twice, so a
retention lock may hold them. Off the event loop.
"""

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import orjson

from billing.errors import ExportError
from billing.reports.heads import send_heads
from tiers.errors import TierError
from tiers.remote.objects import ObjectStore, open_objects, shown_url

BUCKET, URL = ("s3://",), ("http://", "https://")
PREFIX = "heads-"
TIMEOUT_S = 30.0


def keep_heads(line: dict[str, Any], to: str) -> None:
    """Stores a line. Returns once it is stored. Raises `ExportError`."""
    if not to.startswith(BUCKET):
        send_heads(line, to)
        return
    name = f"{PREFIX}{line['at_ns']:020d}-{str(line['key_id'])[:8]}.json"
    try:
        store = open_objects(to, TIMEOUT_S)
        store.put(name, orjson.dumps(line) + b"\n")
        store.close()
    except TierError as error:
        raise ExportError(f"the heads could not be written to {shown_url(to)}: {error}") from error


def read_kept(where: str) -> bytes:
    """All lines of a file, a URL or a bucket. Raises `ExportError`."""
    try:
        if where.startswith(BUCKET):
            return _of_bucket(open_objects(where, TIMEOUT_S))
        if where.startswith(URL):
            with urllib.request.urlopen(where, timeout=TIMEOUT_S) as answer:  # noqa: S310
                body: bytes = answer.read()
            return body
        return Path(where).read_bytes()
    except (OSError, TierError) as error:
        shown = where if Path(where).exists() else shown_url(where)
        raise ExportError(f"the heads in {shown} cannot be read: {error}") from error


def _of_bucket(store: ObjectStore) -> bytes:
    names = sorted(name for name in store.names("") if name.rpartition("/")[2].startswith(PREFIX))
    found: list[bytes] = []
    store.read(names, lambda _, line: found.append(bytes(line)))
    store.close()
    if not names:
        raise ExportError("the bucket holds no heads; is the prefix right?")
    return b"".join(found)
