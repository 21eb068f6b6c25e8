"""Reads an image's bytes from a `data:` URL or from a file in a folder.

Nothing is fetched: following a stranger's URLs would let them reach servers that they cannot reach
themselves. Any thread. Reads the disk.
"""

import base64
import binascii
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine.bounds import MAX_PICTURE_BYTES
from engine.errors import InvalidImage


def data_of(url: str, folder: Path | None) -> bytes:
    """The image that a URL contains, or that it names in `folder` (None: read no files). Raises
    InvalidImage."""
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return _inline(url)
    if scheme == "file" and folder is not None:
        return _of_file(url, folder)
    raise InvalidImage(
        "is not a data: URL, and nothing is fetched; send the image itself, as "
        "data:image/png;base64,..."
    )


def _inline(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidImage("must be base64, as data:image/png;base64,...")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidImage("is not base64") from None


def _of_file(url: str, folder: Path) -> bytes:
    """The file's bytes, if it is in the folder after all links are followed."""
    missing = InvalidImage("names no file in the folder of images")
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve(strict=True)
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(folder.resolve()):
            raise missing
        if not stat.S_ISREG(path.stat().st_mode):
            raise missing
        with path.open("rb") as file:
            return file.read(MAX_PICTURE_BYTES + 1)
    except (OSError, ValueError, RuntimeError):
        raise missing from None
