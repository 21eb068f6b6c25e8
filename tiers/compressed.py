"""Opening text files that may be compressed; apart from the codec, which knows only blocks."""

import gzip
from pathlib import Path
from typing import TextIO

import zstandard

OPEN_ERRORS = (
    OSError,
    EOFError,
    zstandard.ZstdError,
)  # a file that is missing, cut or not what it says


def open_text(path: Path) -> TextIO:
    """Open `path` for reading as UTF-8; `.gz` and `.zst` are decompressed."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix in (".zst", ".zstd"):
        text: TextIO = zstandard.open(path, "rt", encoding="utf-8")
        return text
    return path.open(encoding="utf-8")
