"""Secrets of the data directory: made once, whole, and for their owner's eyes only.

The signing key of `receipts` and the secret behind the tenants' salts (`cachesvc.server.money`) are
such files. Server and command line may ask for one at the same time, from any thread.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def read_or_make(path: Path, fresh: Callable[[], bytes]) -> bytes:
    """What `path` holds; where there is no such file, `fresh()`, which it holds from then on.

    Written and synced beside it and then linked into place: a crash leaves all of it or none, and
    of two that make one at once, both return the winner's.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(fresh())
            file.flush()
            os.fsync(file.fileno())
        path.hardlink_to(name)
    except FileExistsError:
        pass
    finally:
        Path(name).unlink()
    return path.read_bytes()
