"""`purge --tenant`: removes every block of a tenant or group from every tier, with a signed
receipt.

Called by the cache operator of a running server, or by the command line, which holds the folder's
lock. A receipt states what was removed, and that a scan of every block found none left. Anyone with
the server's public key can verify it (`billing.reports.receipts`).
"""

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from billing.reports.receipts import ReceiptSigner
from cachesvc.config.places import disk_path
from tiers.blocks.keys import PrefixKey
from tiers.disk.directory import DirectoryLock, disk_folders, read_elsewhere
from tiers.disk.inspection.maintenance import count, purge
from tiers.disk.inspection.opening import open_shards
from tiers.disk.pin_file import load_pins, save_pins
from tiers.errors import ConfigurationError
from tiers.tier import Removed

RECEIPTS = "receipts"  # folder of the data directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Whose blocks to remove, and who ordered it."""

    kind: str  # tenant, group or scope
    name: str
    by: str
    why: str
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The result of a purge, by tier name."""

    roots: Collection[PrefixKey]
    removed: Mapping[str, Removed]
    pins: Collection[str]
    in_use: int
    num_left: int
    live: bool


class PurgeFailed(Exception):
    """Blocks were left. The message says how many."""


def receipt(signer: ReceiptSigner, order: Order, done: Done) -> dict[str, Any]:
    """The signed receipt. Raises PurgeFailed if blocks were left."""
    if done.num_left:
        raise PurgeFailed(f"{done.num_left} blocks of {order.kind} {order.name} were left")
    told = {
        "what": "cache.purge",
        str(order.kind): order.name,
        "scopes": sorted(root.hex() for root in done.roots),
        "tiers": {
            tier: {"blocks": gone.num_blocks, "bytes": gone.stored_bytes}
            for tier, gone in done.removed.items()
        },
        "blocks_in_use": done.in_use,
        "pins_ended": sorted(done.pins),
        "blocks_left": 0,
        "server": "running" if done.live else "stopped",
        "by": order.by,
        "why": order.why,
        "started_ns": int(order.started_s * 1e9),
        "finished_ns": time.time_ns(),
    }
    return signer.sign(told)


def keep_receipt(data_dir: Path, signed: Mapping[str, Any]) -> Path:
    """Write a receipt into the data directory; returns its file."""
    folder = data_dir / RECEIPTS
    folder.mkdir(mode=0o700, exist_ok=True)
    path = _receipt_path(data_dir, signed["finished_ns"])
    path.write_text(json.dumps(signed, indent=1) + "\n")
    return path


def read_receipt(data_dir: Path, finished_ns: int) -> dict[str, Any] | None:
    """The receipt of the purge that ended at this time, or None."""
    try:
        signed: dict[str, Any] = json.loads(_receipt_path(data_dir, finished_ns).read_text())
    except FileNotFoundError:
        return None
    return signed


def _receipt_path(data_dir: Path, finished_ns: int) -> Path:
    return data_dir / RECEIPTS / f"purge-{finished_ns}.json"


def purge_stopped(data_dir: Path, roots: Collection[PrefixKey]) -> Done:
    """Purges the disk of a stopped server.

    Raises DirectoryLocked if the server is running, and ConfigurationError if there is no disk tier
    or its blocks are also stored elsewhere.
    """
    folder = disk_path(data_dir)
    if places := [place for place in read_elsewhere(folder) if "://" in place]:
        raise ConfigurationError(
            f"there are also blocks in {', '.join(places)}; start the server, and purge through it"
        )
    with open_shards(folder, readonly=False) as (_, shards):
        locks = [DirectoryLock(each) for each in disk_folders(folder)]
        try:
            gone, num_left = purge(shards, roots), count(shards, roots)
            pins = load_pins(folder)
            ended = [pin.name for pin in pins if pin.scope in roots]
            if ended:
                save_pins(folder, [pin for pin in pins if pin.scope not in roots])
        finally:
            for lock in locks:
                lock.release()
    return Done(
        roots=roots,
        removed={"disk": gone},
        pins=ended,
        in_use=0,
        num_left=num_left,
        live=False,
    )
