"""`cachesvc cache verify`: reads and checks every block."""

import time
from dataclasses import asdict
from typing import Annotated

import typer

from api.format import number_of, seconds, size
from cachesvc.cli.options import DataDir, existing_data_dir
from cachesvc.cli.render import AsJson, answer, fail, progress
from cachesvc.config.places import found_disk
from tiers.disk.inspection.opening import open_shards, repair_folder
from tiers.disk.inspection.verify import verify_all


def verify(
    data_dir: DataDir = None,
    repair: Annotated[bool, typer.Option(help="Delete damaged blocks")] = False,
    json: AsJson = False,
) -> None:
    """Read and verify every block, as a hit does. Exits with 1 if a block is damaged."""
    started = time.monotonic()
    path = found_disk(existing_data_dir(data_dir))
    mended = repair_folder(path) if repair else []
    with open_shards(path, readonly=not repair, groups=True) as (_, shards):
        num_blocks = sum(shard.read_totals().num_blocks for shard in shards)
        with progress("verifying", num_blocks) as advance:
            total = verify_all(shards, repair=repair, advance=advance)
    elapsed_s = time.monotonic() - started
    answer(
        asdict(total) | {"sound": total.sound, "mended": mended, "seconds": round(elapsed_s, 3)},
        json,
        f"{number_of(total.num_blocks, 'block')} ({size(total.logical_bytes)} of KV) as they were "
        f"written; checked in {seconds(elapsed_s)}",
        *mended,
        *(f"{number_of(num, 'bad block')}: {reason}" for reason, num in total.bad.items()),
        *total.structure,
        *([f"{total.num_repaired} of them were deleted"] if total.num_repaired else ()),
    )
    if total.structure:
        fail(
            "the databases of the disk tier disagree; a server that starts mends them, and so does "
            "--repair where none runs"
        )
    if not total.sound and total.num_repaired < sum(total.bad.values()):
        fail("the disk tier holds bad blocks; none of them will be served. --repair removes them")
