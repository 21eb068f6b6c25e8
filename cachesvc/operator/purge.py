"""The receipt of a purge, and the part of a purge that the engine's tiers do not do.

Called by the cache operator. A receipt states what was removed, and that a scan of every block
found none left. Anyone with the server's public key can verify it (`billing.reports.receipts`).
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from billing.reports.receipts import ReceiptSigner
from cachesvc.config.places import disk_path
from cachesvc.operator.scopes import ScopeKind, find_damage, roots_of
from tiers.blocks.keys import PrefixKey
from tiers.disk.directory import DirectoryLock, group_folders, is_locked, read_elsewhere, read_meta
from tiers.disk.inspection.maintenance import count, purge
from tiers.disk.inspection.opening import open_disks
from tiers.disk.pin_file import load_pins, save_pins
from tiers.errors import ConfigurationError, PurgeFailed, TierError
from tiers.tier import Purged, Removed, TierName

RECEIPTS = "receipts"  # folder of the data directory


def roots_to_purge(data_dir: Path, name: str, kind: ScopeKind) -> Collection[PrefixKey]:
    """The roots of every block of a tenant or group. Raises PurgeFailed where some are unknown."""
    if damage := find_damage(data_dir):
        raise PurgeFailed(f"{damage.message}; {damage.fix}")
    return frozenset(roots_of(data_dir, name, kind))


def receipt(
    signer: ReceiptSigner,
    kind: ScopeKind,
    name: str,
    done: Purged,
    *,
    by: str,
    why: str,
    started_s: float,
    elsewhere: Sequence[str] = (),
) -> dict[str, Any]:
    """The signed receipt. Raises PurgeFailed if blocks were left. It names the models whose engines
    are `elsewhere`: what they cache leaves as they need room."""
    if done.num_left:
        raise PurgeFailed(f"{done.num_left} blocks of {kind} {name} were left")
    states = {
        str(tier): {"count": gone.num_blocks, "bytes": gone.stored_bytes}
        for tier, gone in done.checkpoints.items()
    }
    receipt = {
        "what": "cache.purge",
        str(kind): name,
        "scopes": sorted(root.hex() for root in done.roots),
        "tiers": {
            str(tier): {"blocks": gone.num_blocks, "bytes": gone.stored_bytes}
            for tier, gone in done.removed.items()
        },
        **({"checkpoints": states} if states else {}),
        "blocks_in_use": done.in_use,
        "pins_ended": sorted(done.pins),
        "blocks_left": 0,
        **({"not_reached": list(elsewhere)} if elsewhere else {}),
        "by": by,
        "why": why,
        "started_ns": int(started_s * 1e9),
        "finished_ns": time.time_ns(),
    }
    return signer.sign(receipt)


def keep_receipt(data_dir: Path, signed: Mapping[str, Any]) -> Path:
    folder = data_dir / RECEIPTS
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"purge-{signed['finished_ns']}.json"
    path.write_text(json.dumps(signed, indent=1) + "\n")
    return path


def purge_unserved(data_dir: Path, roots: Collection[PrefixKey]) -> list[Purged]:
    """Purges what a data directory has from another engine, or from a disk tier that is turned off
    now. Raises PurgeFailed if that is impossible."""
    folders = [each for each in _tiers_of(data_dir) if read_meta(each) and not is_locked(each)]
    try:
        return [_purge_folder(each, roots) for each in folders]
    except TierError as error:
        raise PurgeFailed(str(error)) from error


def together(first: Purged, rest: Sequence[Purged]) -> Purged:
    """The result of several purges of the same scopes."""
    every = [first, *rest]
    return replace(
        first,
        removed=total([each.removed for each in every]),
        checkpoints=total([each.checkpoints for each in every]),
        pins=tuple(name for each in every for name in each.pins),
        num_left=sum(each.num_left for each in every),
    )


def total(parts: Sequence[Mapping[TierName, Removed]]) -> Mapping[TierName, Removed]:
    """What was removed in all, by tier."""
    every: dict[TierName, Removed] = {}
    for tier, gone in (each for part in parts for each in part.items()):
        every[tier] = every.get(tier, Removed()).plus(gone)
    return every


def _tiers_of(data_dir: Path) -> list[Path]:
    """The folders of the server's own disk tier and of its node's, which has one for each
    layout."""
    own = disk_path(data_dir)
    of_node = sorted(file.parent for file in (own / "node").glob("*/disk.json"))
    return of_node if of_node and read_meta(own) is None else [own, *of_node]


def _purge_folder(folder: Path, roots: Collection[PrefixKey]) -> Purged:
    if places := read_elsewhere(folder):
        raise ConfigurationError(
            f"there are also blocks in {', '.join(places)}; serve from {folder} again, and purge"
        )
    groups = group_folders(folder)
    with open_disks(folder, readonly=False, groups=True) as disks:
        opened = [disk.path for disk in disks]
        if missing := [str(each) for each in groups if each not in opened]:
            raise ConfigurationError(
                f"{', '.join(missing)} cannot be read, so its blocks would be left; repair it with "
                "`cachesvc cache verify --repair`, or start the server, and purge again"
            )
        locks = [DirectoryLock(path) for path in opened]
        try:
            of_groups = [shard for disk in disks if disk.path in groups for shard in disk.shards]
            shards = [shard for disk in disks if disk.path not in groups for shard in disk.shards]
            gone, states = purge(shards, roots), purge(of_groups, roots)
            num_left = count(shards + of_groups, roots)
            pins = load_pins(folder)
            ended = [pin.name for pin in pins if pin.scope in roots]
            if ended:
                save_pins(folder, [pin for pin in pins if pin.scope not in roots])
        finally:
            for lock in locks:
                lock.release()
    return Purged(
        roots=tuple(roots),
        removed={TierName.DISK: gone},
        in_use=0,
        pins=tuple(ended),
        num_left=num_left,
        checkpoints={TierName.DISK: states} if of_groups else {},
    )
