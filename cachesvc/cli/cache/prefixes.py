"""`cachesvc cache ls --by room`: the largest prefixes on disk."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from api.format import ago, size
from cachesvc.cli.cache.select import scope_filter
from cachesvc.cli.render import KEY_DIGITS, Column, note, print_documents
from cachesvc.config.places import found_disk
from tiers.blocks.keys import PrefixKey
from tiers.disk.inspection.view import BlockInfo, open_view


def list_by_room(path: Path, tenant: str | None, limit: int, json: bool) -> None:
    """Lists the largest prefixes on disk: a prompt's first block with all its continuations."""
    wanted = scope_filter(path, tenant, None)
    with open_view(found_disk(path)) as view:
        children = view.children()
    found = [
        _prefix(block, children)
        for blocks in children.values()
        for block in blocks
        if block.parent == block.scope and wanted(block.scope)
    ]
    found.sort(key=lambda prefix: -prefix.stored_bytes)
    now_s = time.time()
    columns: dict[str, Column] = {
        "prefix": lambda each: each["key"][:KEY_DIGITS],
        "scope": lambda each: each["scope"][:8],
        "blocks": "num_blocks",
        "tokens": "num_tokens",
        "stored": lambda each: size(each["stored_bytes"]),
        "branches": "num_leaves",
        "last used": lambda each: ago(now_s - each["used_s"]),
    }
    shown = [prefix.as_json() for prefix in found[:limit]]
    print_documents(shown, json, columns, right=tuple(columns)[2:])
    if len(found) > limit and not json:
        note(f"{limit} of {len(found)} prefixes; -n shows more")


@dataclass(slots=True)
class _Prefix:
    key: PrefixKey
    scope: PrefixKey
    num_blocks: int = 0
    num_tokens: int = 0
    stored_bytes: int = 0
    num_leaves: int = 0
    used_s: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"key": self.key.hex(), "scope": self.scope.hex()}


def _prefix(root: BlockInfo, children: Mapping[PrefixKey, Sequence[BlockInfo]]) -> _Prefix:
    total = _Prefix(root.key, root.scope)
    waiting = [root]
    while waiting:
        block = waiting.pop()
        below = children.get(block.key, ())
        total.num_blocks += 1
        total.num_tokens += block.num_tokens
        total.stored_bytes += block.stored_bytes
        total.num_leaves += not below
        total.used_s = max(total.used_s, block.used_s)
        waiting += below
    return total
