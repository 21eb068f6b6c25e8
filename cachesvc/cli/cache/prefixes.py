"""`cachesvc cache ls --by room`: the largest prefixes on disk."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.format import ago, size
from cachesvc.cli.cache.select import scope_filter
from cachesvc.cli.render import KEY_DIGITS, note, print_json, print_table
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
    if json:
        print_json([prefix.as_json() for prefix in found[:limit]])
        return
    now_s = time.time()
    print_table(
        ("prefix", "scope", "blocks", "tokens", "stored", "branches", "last used"),
        [
            (
                prefix.key.hex()[:KEY_DIGITS],
                prefix.scope.hex()[:8],
                prefix.num_blocks,
                prefix.num_tokens,
                size(prefix.stored_bytes),
                prefix.num_leaves,
                ago(now_s - prefix.used_s),
            )
            for prefix in found[:limit]
        ],
        right=("blocks", "tokens", "stored", "branches", "last used"),
    )
    if len(found) > limit:
        note(f"{limit} of {len(found)} prefixes; -n shows more")


@dataclass(slots=True)
class _Prefix:
    """A prompt's first block and all blocks that follow it."""

    key: PrefixKey
    scope: PrefixKey
    num_blocks: int = 0
    num_tokens: int = 0
    stored_bytes: int = 0
    num_leaves: int = 0
    used_s: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.key.hex(),
            "scope": self.scope.hex(),
            "num_blocks": self.num_blocks,
            "num_tokens": self.num_tokens,
            "stored_bytes": self.stored_bytes,
            "num_leaves": self.num_leaves,
            "used_s": self.used_s,
        }


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
