"""Reading text files that may be compressed; apart from the codec, which knows only blocks."""

import gzip
import zlib
from pathlib import Path

import zstandard

# What `read_text` raises for a file that is missing, cut short, or not what its name says.
READ_ERRORS = (OSError, EOFError, UnicodeDecodeError, zlib.error, zstandard.ZstdError)


def read_text(path: Path) -> str:
    """The whole file as UTF-8 text; `.gz` and `.zst` are decompressed."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    elif path.suffix in (".zst", ".zstd"):
        data = _zstd_decompress(data)
    return data.decode("utf-8")


def _zstd_decompress(data: bytes) -> bytes:
    """All frames of `data`; a stream that ends within a frame raises EOFError."""
    parts = []
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts.append(frame.decompress(data))
        if not frame.eof:
            raise EOFError("the compressed file ends within a frame")
        data = frame.unused_data
    return b"".join(parts)
