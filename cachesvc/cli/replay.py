"""`cachesvc replay`: hits and disk writes of a request trace, without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cachesvc.cli.render import AsJson, print_json, print_table, progress
from tiers.policy.admission import WritePolicy
from tiers.replay.replay import TierPlan
from tiers.replay.replay import replay as run_replay
from tiers.replay.trace import MOONCAKE_BLOCK_TOKENS, Trace, TraceError, read_trace
from tiers.tier import TierName


def replay(
    trace: Annotated[Path, typer.Argument(help="A Mooncake-style trace: .jsonl or .gz.")],
    capacity_blocks: Annotated[
        str, typer.Option(help="Capacities to sweep: blocks, or shares of the working set.")
    ] = "1%,5%,10%,25%,50%,100%",
    tiers: Annotated[
        str | None, typer.Option(help="Tiers instead of a sweep: device=1%,host=9%,disk=90%.")
    ] = None,
    write_policy: Annotated[
        WritePolicy, typer.Option(help="When a block is copied from the top tier down.")
    ] = WritePolicy.ON_EVICT,
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in one hash id of the trace.")
    ] = MOONCAKE_BLOCK_TOKENS,
    json: AsJson = False,
) -> None:
    """Replay a request trace through LRU tiers of any size, with no tensors.

    A block counts as a hit only if all blocks before it in its request hit. Hit rates are by token.
    """
    try:
        loaded = read_trace(trace, block_tokens)
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="TRACE") from error
    plans = _plans(loaded.working_set_blocks(), capacity_blocks, tiers)
    results = []
    with progress("replay", len(plans)) as advance:
        for plan in plans:
            results.append(run_replay(loaded, plan, write_policy=write_policy))
            advance(1)
    records = [asdict(result) | {"hit_rate": result.hit_rate} for result in results]
    if json:
        print_json(records)
    else:
        _print(loaded, records)


def _plans(working_set: int, capacities: str, tiers: str | None) -> list[list[TierPlan]]:
    """The replays to run: one cache at each capacity, or all tiers over one another."""
    if tiers is not None:
        return [[_tier(part, working_set) for part in tiers.split(",")]]
    sizes = [_blocks(part, working_set, "--capacity-blocks") for part in capacities.split(",")]
    return [[TierPlan("cache", size)] for size in sizes]


def _tier(text: str, working_set: int) -> TierPlan:
    name, separator, size = text.partition("=")
    if not separator or name.strip() not in list(TierName):
        raise typer.BadParameter(
            f"{text!r} is not NAME=SIZE, as in device=1%; the tiers are {', '.join(TierName)}",
            param_hint="--tiers",
        )
    return TierPlan(name.strip(), _blocks(size, working_set, "--tiers"))


def _blocks(text: str, working_set: int, option: str) -> int:
    """A number of blocks, or a share of the distinct blocks of the trace."""
    text = text.strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else 0
        blocks = max(round(share * working_set), 1) if share > 0 else int(text)
    except (ValueError, OverflowError):
        blocks = 0
    if blocks < 1:
        raise typer.BadParameter(
            f"{text!r} is neither a number of blocks above 0 nor a share like 5% of the "
            f"{working_set} blocks of the trace",
            param_hint=option,
        )
    return blocks


def _written(record: Mapping[str, Any]) -> int:
    """Blocks written to the disk."""
    disks = [tier for tier in record["tiers"] if tier["name"] == TierName.DISK]
    return sum(tier["written_blocks"] for tier in disks)


def _print(trace: Trace, records: Sequence[dict[str, Any]]) -> None:
    """A row for each result. Figures are never cut; a narrow window gets fewer columns."""
    working_set = trace.working_set_blocks()
    tiers = [tier["name"] for tier in records[0]["tiers"] if len(records[0]["tiers"]) > 1]
    rows = []
    for record in records:
        by_tier = [f"{tier['hit_tokens'] / record['tokens']:.4f}" for tier in record["tiers"]]
        rows.append(
            [
                f"{record['capacity_blocks']:,}",
                f"{record['capacity_blocks'] / working_set:.1%}",
                f"{record['hit_rate']:.4f}",
                *(by_tier if tiers else ()),
                f"{_written(record):,}",
            ]
        )
    figures = ["blocks", "of all", "hit rate", *tiers, "written to disk"]
    print_table(
        figures,
        rows,
        title=f"{trace.name}: {len(trace.requests):,} requests, {trace.input_tokens:,} tokens, "
        f"{working_set:,} distinct blocks of {trace.block_tokens} tokens",
        right=figures,
        spare=("of all",),
    )
