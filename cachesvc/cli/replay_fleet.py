"""The output of `cachesvc replay --servers N`: hit rates, traffic and balance of a fleet."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from cachesvc.cli.render import print_table
from tiers.replay.fleet import FleetReplay, Routing, replay_fleet
from tiers.replay.replay import TierPlan
from tiers.replay.trace import Trace


def fleets(
    trace: Trace,
    plans: Sequence[TierPlan],
    num_servers: int,
    shared_blocks: int,
    progress: Callable[[int], None],
) -> list[FleetReplay]:
    """Each routing, without and with the shared store."""
    stores = [0, shared_blocks] if shared_blocks else [0]
    return [
        replay_fleet(trace, plans, num_servers, routing, shared_blocks=blocks, progress=progress)
        for routing in Routing
        for blocks in stores
    ]


def fleet_json(results: Sequence[FleetReplay], block_bytes: int) -> str:
    return json.dumps([_row(result, block_bytes) for result in results], indent=2)


def print_fleet(trace: Trace, results: Sequence[FleetReplay], block_bytes: int) -> None:
    """A row for each routing. Figures are never cut; a narrow window gets fewer columns."""
    figures = ["shared", "hit", "from it", "read MB/s", "written MB/s", "lookups/s", "busiest"]
    print_table(
        ["routing", *figures],
        [_cells(result, block_bytes) for result in results],
        title=f"{trace.name}: {len(trace.requests):,} requests over "
        f"{results[0].num_servers} servers",
        right=figures,
        spare=("lookups/s", "from it"),
    )


def _cells(result: FleetReplay, block_bytes: int) -> list[str]:
    row = _row(result, block_bytes)
    return [
        str(result.routing),
        f"{result.shared_blocks:,}" if result.shared_blocks else "none",
        f"{result.hit_rate:.1%}",
        f"{result.shared_hit_tokens / result.tokens:.1%}",
        f"{row['read_mb_per_s']:.1f}",
        f"{row['written_mb_per_s']:.1f}",
        f"{row['lookups_per_s']:.1f}",
        f"{result.imbalance:.2f}x",
    ]


def _row(result: FleetReplay, block_bytes: int) -> dict[str, object]:
    seconds = max(result.seconds, 1e-9)
    return asdict(result) | {
        "hit_rate": result.hit_rate,
        "computed_tokens": result.computed_tokens,
        "read_mb_per_s": result.shared_read * block_bytes / seconds / 1e6,
        "written_mb_per_s": result.shared_written * block_bytes / seconds / 1e6,
        "lookups_per_s": result.shared_lookups / seconds,
    }
