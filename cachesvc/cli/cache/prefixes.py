"""`cachesvc cache ls --by room`: the largest prefixes on disk."""

import time
from collections.abc import Mapping, Sequence
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
    found.sort(key=lambda prefix: -prefix["stored_bytes"])
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
    print_documents(found[:limit], json, columns, right=tuple(columns)[2:])
    if len(found) > limit and not json:
        note(f"{limit} of {len(found)} prefixes; -n shows more")


def _prefix(root: BlockInfo, children: Mapping[PrefixKey, Sequence[BlockInfo]]) -> dict[str, Any]:
    """A prompt's first block and all blocks that follow it."""
    blocks = [root]
    for block in blocks:  # which grows meanwhile
        blocks += children.get(block.key, ())
    return {
        "key": root.key.hex(),
        "scope": root.scope.hex(),
        "num_blocks": len(blocks),
        "num_tokens": sum(block.num_tokens for block in blocks),
        "stored_bytes": sum(block.stored_bytes for block in blocks),
        "num_leaves": sum(block.key not in children for block in blocks),
        "used_s": max(block.used_s for block in blocks),
    }
