"""`cachesvc cache stats`: how full the tiers are."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import typer

from api.format import number_of, percent, size
from cachesvc.cli.options import DataDir, existing_data_dir
from cachesvc.cli.render import AsJson, Column, print_documents, print_json, print_pairs
from cachesvc.config.places import found_disk
from cachesvc.server.server_file import find_server
from tiers.disk.inspection.view import DiskSummary, open_view
from tiers.tier import TierName


def stats(data_dir: DataDir = None, json: AsJson = False) -> None:
    """Show blocks, bytes and compression of the disk tier; with a running server, of every tier."""
    path = existing_data_dir(data_dir)
    server = find_server(path)
    tiers = server.get("/admin/api/stats")["cache"]["tiers"] if server is not None else {}
    owners = server.get("/admin/api/cache/owners") if server is not None else []
    summary = None
    if "disk" in tiers or not tiers:  # a server may have none
        with open_view(found_disk(path)) as view:
            summary = view.summary()
    if json:
        shown: dict[str, Any] = {}
        if summary is not None:
            shown = {"tier": "disk", **asdict(summary), "ratio": round(summary.ratio, 4)}
        print_json(shown | ({"tiers": tiers, "owners": owners} if tiers else {}))
        return
    if summary is not None:
        print_pairs(_summary_pairs(summary))
    _print_tiers(tiers)
    _print_owners(owners)


def _print_tiers(tiers: Mapping[str, Any]) -> None:
    if not tiers:
        return
    typer.echo("")
    columns: dict[str, Column] = {
        "tier": "name",
        "blocks": "num_blocks",
        "used": lambda tier: size(tier["used_bytes"]),
        "of": lambda tier: size(tier["capacity_bytes"]),
        "fill": lambda tier: percent(tier["used_bytes"], tier["capacity_bytes"]),
        "served": "hits",
        "stored": "stored",
        "evicted": "evicted",
    }
    found = [tier | {"name": name} for name, tier in tiers.items()]
    print_documents(found, False, columns, right=tuple(columns)[1:])


def _print_owners(owners: Sequence[Mapping[str, Any]]) -> None:
    if not owners:
        return
    typer.echo("")
    names = [tier for tier in TierName if any(tier in each["bytes"] for each in owners)]
    columns = {"owner": "owner", "model": "model"} | {
        tier: partial(_bytes_in, tier) for tier in names
    }
    print_documents(owners, False, columns, right=names)


def _bytes_in(tier: TierName, owner: Mapping[str, Any]) -> str:
    return size(owner["bytes"][tier]) if tier in owner["bytes"] else "-"


def _capacity(summary: DiskSummary) -> str:
    setting, allowed = size(summary.setting_bytes), size(summary.capacity_bytes)
    if summary.capacity_bytes >= 0.99 * summary.setting_bytes:  # less what is no block
        return f"{setting}, as set"
    return f"{allowed} of {setting}: its file system has no more to spare (see docs/disk.md)"


def _summary_pairs(summary: DiskSummary) -> dict[str, object]:
    return {
        "directory": summary.path,
        "server": summary.server or "none running",
        "blocks": summary.num_blocks,
        "files": f"{size(summary.file_bytes)} of {size(summary.capacity_bytes)} "
        f"({percent(summary.file_bytes, summary.capacity_bytes)})",
        "capacity": _capacity(summary),
        "KV": f"{size(summary.logical_bytes)}, stored as {size(summary.stored_bytes)} "
        f"(ratio {summary.ratio:.2f})",
        "scopes": summary.num_scopes,
        "shards": summary.num_shards,
        "ever stored": f"{number_of(summary.num_stored, 'block')}, {size(summary.written_bytes)}",
        "ever evicted": number_of(summary.num_evicted, "block"),
    }
