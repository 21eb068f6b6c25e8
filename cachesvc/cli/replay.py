"""`cachesvc replay`: hits, transfers and cost of a request trace, without a model."""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated

import typer

from cachesvc.cli.render import progress
from cachesvc.cli.replay_fleet import fleet_json, fleets, print_fleet
from cachesvc.cli.replay_report import Prices, as_json, print_results
from tiers.errors import ConfigurationError
from tiers.policy.admission import WritePolicy
from tiers.policy.names import PolicyName, unknown_policy
from tiers.policy.registry import policy_in
from tiers.replay.replay import MIN, ReplayResult, TierPlan, check_plans
from tiers.replay.replay import replay as run_replay
from tiers.replay.trace import MOONCAKE_BLOCK_TOKENS, Trace, TraceError, read_trace
from tiers.tier import TierName

DEFAULT_CAPACITIES = "1%,5%,10%,25%,50%,100%"
DEFAULT_TOKEN_BYTES = 23_040  # SmolLM2-135M in bf16: 30 layers x 2 x 3 heads x 64 x 2 bytes
POLICIES = (*PolicyName, MIN)


def replay(
    trace: Annotated[Path, typer.Argument(help="A Mooncake-style trace: .jsonl, .gz or .zst.")],
    policy: Annotated[str, typer.Option(help=f"Any of {', '.join(POLICIES)}.")] = "lru",
    capacity_blocks: Annotated[
        str, typer.Option(help="Capacities to sweep: blocks, or shares of the working set.")
    ] = DEFAULT_CAPACITIES,
    tiers: Annotated[
        str | None, typer.Option(help="Tiers instead of a sweep: device=1%,host=9%,disk=90%.")
    ] = None,
    write_policy: Annotated[
        WritePolicy, typer.Option(help="When a block is copied from the top tier down.")
    ] = WritePolicy.ON_EVICT,
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in one hash id of the trace.")
    ] = MOONCAKE_BLOCK_TOKENS,
    token_bytes: Annotated[
        int,
        typer.Option(min=1, help="Bytes of KV for each token; default: the default model in bf16."),
    ] = DEFAULT_TOKEN_BYTES,
    hit_price: Annotated[str, typer.Option(help="Price of a million hit tokens.")] = "0.1",
    miss_price: Annotated[str, typer.Option(help="Price of a million missed tokens.")] = "1",
    currency: Annotated[str, typer.Option(help="Currency of the prices.")] = "CNY",
    servers: Annotated[
        int | None, typer.Option(min=1, help="Number of servers to spread the trace over.")
    ] = None,
    shared: Annotated[
        str | None, typer.Option(help="Size of a store below all servers, such as 50%.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list of results.")] = False,
) -> None:
    """Replay a request trace through cache policies, with no tensors.

    A block counts as a hit only if all blocks before it in its request hit. Hit rates are by token.
    With --servers, --tiers are those of each server, and routing by prefix is compared with random
    routing.
    """
    prices = Prices(_price(hit_price, "--hit-price"), _price(miss_price, "--miss-price"), currency)
    names = _policies(policy)
    try:
        loaded = read_trace(trace, block_tokens)
        plans = _plans(loaded, names, capacity_blocks, tiers)
        if servers is not None:
            _print_fleet(loaded, plans, servers, shared, block_tokens * token_bytes, json)
            return
        if shared is not None:
            raise typer.BadParameter(
                "it stands below several; give --servers", param_hint="--shared"
            )
        results = _run(loaded, plans, write_policy)
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="TRACE") from error
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from error
    block_bytes = block_tokens * token_bytes
    if json:
        typer.echo(as_json(results, prices, block_bytes))
        return
    print_results(loaded, results, prices, block_bytes)


def _print_fleet(
    trace: Trace,
    plans: Sequence[Sequence[TierPlan]],
    num_servers: int,
    shared: str | None,
    block_bytes: int,
    as_text: bool,
) -> None:
    size = _blocks(shared, trace.working_set_blocks(), "--shared") if shared else 0
    rounds = 2 * (2 if size else 1) * len(plans)
    if any(tier.policy == MIN for plan in plans for tier in plan):
        raise typer.BadParameter("min knows one server's future", param_hint="--policy")
    with progress("replay", rounds * len(trace.requests)) as advance:
        found = [fleets(trace, plan, num_servers, size, advance) for plan in plans]
    if as_text:
        typer.echo(fleet_json([result for each in found for result in each], block_bytes))
        return
    for plan, results in zip(plans, found, strict=True):
        sizes = ", ".join(f"{tier.name} {tier.capacity_blocks:,} ({tier.policy})" for tier in plan)
        typer.echo(f"Each server: {sizes} blocks")
        print_fleet(trace, results, block_bytes)


def _run(
    trace: Trace,
    plans: Sequence[Sequence[TierPlan]],
    write_policy: WritePolicy,
) -> list[ReplayResult]:
    with progress("replay", len(plans) * len(trace.requests)) as advance:
        return [
            run_replay(trace, plan, write_policy=write_policy, progress=advance) for plan in plans
        ]


def _plans(
    trace: Trace, names: Sequence[str], capacities: str, tiers: str | None
) -> list[list[TierPlan]]:
    """The replays to run: each policy at each capacity, or each policy over the tiers."""
    working_set = trace.working_set_blocks()
    if tiers is not None:
        sizes = [_tier(part, working_set) for part in tiers.split(",")]
        plans = [
            [TierPlan(tier, size, _policy_in(tier, policy)) for tier, size in sizes]
            for policy in names
        ]
    else:
        blocks = [_blocks(part, working_set, "--capacity-blocks") for part in capacities.split(",")]
        plans = [[TierPlan("cache", size, policy)] for policy in names for size in blocks]
    for plan in plans:
        check_plans(plan)
    return plans


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise typer.BadParameter(unknown_policy(name, POLICIES), param_hint="--policy")
    return names


def _policy_in(tier: TierName, policy: str) -> str:
    return policy if policy == MIN else policy_in(tier, policy)


def _tier(text: str, working_set: int) -> tuple[TierName, int]:
    name, separator, size = text.partition("=")
    if not separator or not name.strip():
        raise typer.BadParameter(
            f"{text!r} is not NAME=SIZE, as in device=1%", param_hint="--tiers"
        )
    if name.strip() not in list(TierName):
        raise typer.BadParameter(
            f"there is no tier {name.strip()!r}; the tiers are {', '.join(TierName)}",
            param_hint="--tiers",
        )
    return TierName(name.strip()), _blocks(size, working_set, "--tiers")


def _blocks(text: str, working_set: int, option: str) -> int:
    """A number of blocks, or a share of the distinct blocks of the trace."""
    text = text.strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else None
        if share is None:
            blocks = int(text)
        else:
            blocks = max(round(share * working_set), 1 if share > 0 else 0)
    except (ValueError, OverflowError):
        blocks = 0
    if blocks < 1:
        raise typer.BadParameter(
            f"{text!r} is neither a number of blocks above 0 nor a share like 5% of the "
            f"{working_set} blocks of the trace",
            param_hint=option,
        )
    return blocks


def _price(text: str, option: str) -> Decimal:
    try:
        price = Decimal(text)
    except InvalidOperation:
        price = Decimal(-1)
    if not price.is_finite() or price < 0:
        raise typer.BadParameter(f"{text!r} is not a price of 0 or more", param_hint=option)
    return price
