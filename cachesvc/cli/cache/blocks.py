"""`cachesvc cache ls|show`: single blocks, on disk and in a server's memory.

The command reads the disk itself and asks the running server for its memory. Without a server it
shows only the disk.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from api.format import ago, seconds, size
from cachesvc.cli.cache.select import Tenant, find_block, scope_filter
from cachesvc.cli.options import DataDir, duration, existing_data_dir
from cachesvc.cli.render import (
    KEY_DIGITS,
    AsJson,
    Column,
    fail,
    note,
    print_documents,
    print_json,
    print_pairs,
)
from cachesvc.config.places import found_disk
from cachesvc.server.server_file import LiveServer, find_server
from tiers.blocks.keys import PrefixKey, token_ids
from tiers.disk.format.codec import CodecId
from tiers.disk.inspection.view import BlockInfo, open_view
from tiers.tier import TierName

MOST = 100_000  # blocks that a server returns at once


def list_blocks(
    data_dir: DataDir = None,
    tier: Annotated[
        TierName, typer.Option(help="Tier to list; device and host need the running server")
    ] = (TierName.DISK),
    tenant: Tenant = None,
    scope: Annotated[
        str | None, typer.Option(help="Only blocks of the scope whose root starts with this (hex)")
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="Only blocks unused for this long, such as 2h or 7d",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="At most this many; 0 for all")
    ] = 100,
    json: AsJson = False,
) -> None:
    """List blocks of a tier: key, parent, tokens, size and age; those in memory by their hits."""
    path = existing_data_dir(data_dir)
    wanted = scope_filter(path, tenant, scope)
    if tier is TierName.DISK:
        _list_disk(path, wanted, older_than or 0.0, limit, json)
    else:
        _list_memory(path, wanted, tier, older_than or 0.0, limit, json)


def show(
    key: Annotated[str, typer.Argument(help="A block's key, or its first digits (hex)")],
    data_dir: DataDir = None,
    tokens: Annotated[bool, typer.Option(help="Print the token ids as well")] = False,
    text: Annotated[
        bool, typer.Option(help="Print the tokens as text; needs the running server's tokenizer")
    ] = False,
    json: AsJson = False,
) -> None:
    """Show one block: its identity, its neighbours, and where and how it is stored."""
    path = existing_data_dir(data_dir)
    server = find_server(path)
    live = _live_block(server, key)
    fields = _on_disk(path, key, missing_ok=live is not None) | (live or {})
    ids: Sequence[int] = fields.pop("token_ids")
    if tokens:
        fields["token_ids"] = list(ids)
    if text:
        if server is None:
            fail("--text needs the running server, which knows the tokenizer; --tokens does not")
        fields["text"] = server.post("/admin/api/detokenize", {"token_ids": list(ids)})["text"]
    if json:
        print_json(fields)
        return
    print_pairs({name: _readable(name, value) for name, value in fields.items()})


def _readable(name: str, value: Any) -> Any:
    if name.endswith("_bytes"):
        return size(value)
    if name in ("idle_s", "age_s"):
        return seconds(value)
    if name in ("computed_s", "written_s", "used_s"):
        return ago(time.time() - value)
    if name == "token_ids":
        return " ".join(map(str, value))
    return (", ".join(value) or "-") if isinstance(value, list) else value


def _list_disk(
    path: Path, wanted: Callable[[PrefixKey], bool], idle_s: float, limit: int, json: bool
) -> None:
    now_s = time.time()
    with open_view(found_disk(path)) as view:
        found = (
            block
            for block in view.blocks()
            if wanted(block.scope) and now_s - block.used_s >= idle_s
        )
        blocks = list(islice(found, limit or None))
        total = view.summary().num_blocks
    _print_disk(blocks, json)
    if not json and limit and len(blocks) == limit < total:
        note(f"{len(blocks)} of {total} blocks; --limit 0 lists all that match")


def _list_memory(
    path: Path,
    wanted: Callable[[PrefixKey], bool],
    tier: TierName,
    idle_s: float,
    limit: int,
    json: bool,
) -> None:
    server = find_server(path)
    if server is None:
        fail(f"no server runs on {path}, and the {tier} tier ended with it; --tier disk")
    found = _in_memory(server, tier=tier, idle_s=idle_s, limit=MOST)
    matching = [block for block in found if wanted(PrefixKey(bytes.fromhex(block["scope"])))]
    shown = matching[: limit or None]
    _print_memory(shown, json)
    if not json and len(shown) < len(matching):
        note(f"{len(shown)} of {len(matching)} blocks; --limit 0 lists all that match")


def _in_memory(server: LiveServer, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/admin/api/blocks", query)["blocks"]
    return found


def _live_block(server: LiveServer | None, key: str) -> dict[str, Any] | None:
    """The one block in memory whose key begins with `key`."""
    if server is None or not key or set(key.lower()) - set("0123456789abcdef") or len(key) > 32:
        return None
    found = _in_memory(server, key=key.lower(), tokens="1", limit=2)
    return found[0] if len(found) == 1 else None


def _on_disk(path: Path, key: str, *, missing_ok: bool) -> dict[str, Any]:
    with open_view(found_disk(path)) as view:
        block = find_block(view, key, missing_ok=missing_ok)
        if block is None:
            return {}
        chain = view.chain(block)
        children = [child.key.hex() for child in view.children().get(block.key, [])]
    return block_json(block) | {
        "tiers": ["disk"],
        "depth": len(chain) - 1,
        "complete": chain[0].parent == chain[0].scope,
        "children": children,
        "checksum": f"{block.checksum:016x}",
        "token_ids": token_ids(block.tokens),
    }


def block_json(block: BlockInfo) -> dict[str, Any]:
    """A block on disk as JSON, with the field names of /admin/api/blocks."""
    same = ("num_tokens", "stored_bytes", "logical_bytes", "computed_s", "written_s", "used_s")
    return {
        **{name: getattr(block, name).hex() for name in ("key", "parent", "scope")},
        "tier": "disk",
        **{name: getattr(block, name) for name in (*same, "shard")},
        "codec": CodecId(block.codec).name.lower(),
        "fault": block.why,
    }


def _print_disk(blocks: Sequence[BlockInfo], json: bool) -> None:
    now_s = time.time()
    columns: dict[str, Column] = {
        "key": lambda block: block["key"][:KEY_DIGITS],
        "parent": _parent,
        "tokens": "num_tokens",
        "stored": lambda block: size(block["stored_bytes"]),
        "ratio": _ratio,
        "written": lambda block: ago(now_s - block["computed_s"]),
        "used": lambda block: ago(now_s - block["used_s"]),
    }
    found = list(map(block_json, blocks))
    none = "no block on disk is like that"
    print_documents(found, json, columns, right=tuple(columns)[2:], none=none)


def _parent(block: Mapping[str, Any]) -> str:
    is_first = block["parent"] == block["scope"]
    return "(root)" if is_first else str(block["parent"][:KEY_DIGITS])


def _ratio(block: Mapping[str, Any]) -> str:
    stored = block["stored_bytes"]
    return f"{block['logical_bytes'] / stored:.2f}" if stored else "-"


def _print_memory(blocks: Sequence[Mapping[str, Any]], json: bool) -> None:
    columns: dict[str, Column] = {
        "key": lambda block: block["key"][:KEY_DIGITS],
        "parent": _parent,
        "scope": lambda block: block["scope"][:8],
        "tiers": lambda block: " ".join(block["tiers"]),
        "number": "depth",
        "tokens": "num_tokens",
        "hits": "hits",
        "in use": lambda block: block["pins"] or "",
        "idle": lambda block: seconds(block["idle_s"]),
    }
    print_documents(blocks, json, columns, right=tuple(columns)[4:])
