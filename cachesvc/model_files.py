"""What a model's KV depends on, by content: the files that another engine loaded it from."""

from functools import lru_cache
from pathlib import Path

import xxhash

_READ_BYTES = 1 << 22
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "config.json")


class UnsupportedKv(Exception):
    """The engine's KV has a form that is not supported here; the message says why."""


def weights_digest(name: str, revision: str | None, *, is_sole: bool = False) -> bytes:
    """Of the files that a model was loaded from: a folder, or a name in the hub's cache. Raises
    UnsupportedKv if they are not found or, with `is_sole`, if the cache has other revisions."""
    folder = Path(name)
    if not folder.exists():
        folder = _snapshot(name, revision)
        if is_sole and len(list(folder.parent.iterdir())) > 1:
            raise UnsupportedKv(
                f"the hub's cache has several revisions of {name}; say in `scope` which one runs"
            )
    return files_digest(str(folder), _WEIGHT_FILES)


def _snapshot(name: str, revision: str | None) -> Path:
    """The folder in the hub's cache from which an engine loaded this model."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise UnsupportedKv(f"the files of {name} are not found, so its KV has no identity")
    return Path(found).parent


@lru_cache(maxsize=256)
def files_digest(path: str, patterns: tuple[str, ...], read: object = None) -> bytes:
    """A 16-byte digest of a file, or of a folder's files that match the patterns, once for each
    `read`. Raises UnsupportedKv if there are none."""
    root = Path(path)
    files = [root] if root.is_file() else sorted({f for p in patterns for f in root.glob(p)})
    if not files:
        raise UnsupportedKv(f"there are no weights in {path}")
    hasher = xxhash.xxh3_128(b"cachesvc.vllm.files.v1")
    for file in files:
        hasher.update(file.name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            while chunk := opened.read(_READ_BYTES):
                hasher.update(chunk)
    return hasher.digest()
