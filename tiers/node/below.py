"""The tiers below a node's memory: the disk of one layout, and a store that nodes share."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tiers.blocks.layout import BlockLayout
from tiers.disk.open import open_disk
from tiers.disk.settings import DiskSettings
from tiers.errors import NodeError, TierError
from tiers.node.counters import SUMS
from tiers.node.settings import NodeSettings
from tiers.policy.quota import QuotaShares
from tiers.remote.stacked import stack
from tiers.telemetry.events import EventStream
from tiers.tier import ManagedTier, TierStats

FOLDER_DIGITS = 8  # of a folder's name, where a shard is named


def disk_folder(root: Path, layout: BlockLayout) -> Path:
    """The folder within a node's folder that holds the blocks of a layout."""
    return root / layout.digest().hex()


def open_below(
    settings: NodeSettings, layout: BlockLayout, shares: QuotaShares | None, stream: EventStream
) -> ManagedTier:
    """Open the tiers of a layout. Raises NodeError."""
    assert settings.disk_dir is not None, "there is no tier below"
    try:
        remote = settings.remote
        opened = remote.open() if remote is not None else None
        disk = open_disk(
            disk_folder(settings.disk_dir, layout),
            layout,
            settings.disk_bytes,
            settings=DiskSettings(
                computes_elsewhere=True,  # in an engine on a GPU
                reserve_bytes=settings.disk_reserve_bytes,
            ),
            shares=shares,
            stream=stream,
        )
    except (TierError, OSError) as error:  # such as a full disk
        raise NodeError(f"the disk cache cannot be opened: {error}") from error
    return disk if remote is None or opened is None else stack(disk, layout, opened, remote)


def stats_below(below: ManagedTier | None, layout: BlockLayout) -> dict[str, Any]:
    """The counters of each tier below, as JSON. Shards are named with the layout's folder."""
    if below is None:
        return {}
    folder = disk_folder(Path(), layout).name[:FOLDER_DIGITS]
    return {str(level.name): _as_json(level.stats(), folder) for level in below.levels()}


def _as_json(stats: TierStats, folder: str) -> dict[str, Any]:
    shards = [replace(shard, name=f"{folder}/{shard.name}") for shard in stats.shards]
    return {
        **{name: getattr(stats, name) for name in SUMS},
        "faults": {str(reason): number for reason, number in stats.faults.items()},
        "shards": [asdict(shard) for shard in shards],
    }
