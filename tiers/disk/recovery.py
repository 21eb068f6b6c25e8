"""Walk every page that holds the structure of a shard: `python -m tiers.disk.recovery SHARD
MAP_BYTES`.

Run by `tiers.disk.open` as a child process, because LMDB answers torn pages with an abort or a
signal. Keys alone are walked; LMDB then reads the first page of each value and no more. Exit status
0 means that the databases agree with each other; the payloads have their own checksums.
"""

import struct
import sys
from pathlib import Path

from tiers.disk.shard import Shard
from tiers.disk.storage import Storage

_META = struct.Struct("<IIQQ")  # magic, version, map address, map size
_META_MAGIC = 0xBEEFC0DE
_META_AT = 16  # after the page header
_LAST_PAGE_AT = _META_AT + _META.size + 2 * 48  # two MDB_db structs lie between
_PAGE_BYTES = 4096


def claimed_bytes(path: Path) -> int:
    """How long `data.mdb` must be, by the newer of its two meta pages; 0 where there is none."""
    with (path / "data.mdb").open("rb") as file:
        head = file.read(2 * _PAGE_BYTES)
    claims = [(0, 0)]
    for page in (head[:_PAGE_BYTES], head[_PAGE_BYTES:]):
        if len(page) < _LAST_PAGE_AT + 16:
            continue
        if _META.unpack_from(page, _META_AT)[0] == _META_MAGIC:
            last_page, transaction = struct.unpack_from("<QQ", page, _LAST_PAGE_AT)
            claims.append((transaction, last_page + 1))
    return max(claims)[1] * _PAGE_BYTES


def main() -> None:
    path, map_bytes = Path(sys.argv[1]), int(sys.argv[2])
    shard = Shard(path, map_bytes, storage=Storage(), readonly=True)
    problem = shard.walk()
    if problem is not None:
        sys.exit(problem)


if __name__ == "__main__":
    main()
