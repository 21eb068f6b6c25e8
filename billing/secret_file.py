"""Secrets of the data directory: created once, atomically, readable by their owner only.

The signing key of `receipts` and the secret behind the tenants' salts (`cachesvc.operator.secret`)
are such files. Server and command line may request one at the same time, from any thread.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def read_or_make(path: Path, fresh: Callable[[], bytes]) -> bytes:
    """The content of `path`. If the file does not exist, it is created with `fresh()`.

    The file is written and synced beside it and then linked into place. A crash leaves all of it or
    none, and of two concurrent callers both return the winner's.
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
