"""Many servers over one trace: what routing and a shared store are worth."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cachesvc.cli import app
from tiers.replay.fleet import FleetReplay, Routing, Shared, replay_fleet
from tiers.replay.replay import TierPlan, replay
from tiers.replay.trace import Trace, TraceRequest

TOKENS = 16


def conversations(num: int, turns: int, seed: int = 0) -> Trace:
    """Chats that grow by a block a turn, in a random order; all begin with one system block."""
    dice = random.Random(seed)
    due = [chat for chat in range(num) for _ in range(turns)]
    dice.shuffle(due)
    depth = [0] * num
    requests = []
    for number, chat in enumerate(due):
        depth[chat] += 1
        blocks = ("system", *(f"{chat}.{turn}" for turn in range(depth[chat])))
        requests.append(TraceRequest(float(number), len(blocks) * TOKENS, blocks))
    return Trace("chats", requests, TOKENS)


def run(servers: int, routing: Routing, **options: Any) -> FleetReplay:
    plan = [TierPlan("host", 400)]
    return replay_fleet(conversations(40, 12), plan, servers, routing, **options)


@pytest.mark.parametrize("routing", list(Routing))
def test_one_server_is_the_plain_replay(routing: Routing) -> None:
    trace, plan = conversations(40, 12), [TierPlan("host", 100)]
    alone = replay(trace, plan)
    fleet = replay_fleet(trace, plan, 1, routing)
    assert alone.hit_tokens == fleet.local_hit_tokens
    assert (alone.tokens, 0, 1.0) == (fleet.tokens, fleet.shared_hit_tokens, fleet.imbalance)


def test_tokens_are_hit_or_computed() -> None:
    for routing in Routing:
        result = run(8, routing, shared_blocks=1000)
        assert result.tokens == (
            result.local_hit_tokens + result.shared_hit_tokens + result.computed_tokens
        )


def test_a_router_that_knows_prefixes_beats_one_that_does_not() -> None:
    assert run(8, Routing.PREFIX).hit_rate > run(8, Routing.RANDOM).hit_rate + 0.1


def test_a_shared_store_makes_up_for_a_router_that_does_not_know() -> None:
    without = run(8, Routing.RANDOM)
    reused = run(8, Routing.RANDOM, shared_blocks=1000)
    everything = run(8, Routing.RANDOM, shared_blocks=1000, takes_all=True)
    assert without.hit_rate < reused.hit_rate < everything.hit_rate
    assert reused.shared_written < everything.shared_written
    one = run(1, Routing.RANDOM, shared_blocks=1000)
    alone = replay(conversations(40, 12), [TierPlan("host", 1000)])
    assert everything.hit_rate == pytest.approx(alone.hit_rate)  # neither forgets anything
    assert one.hit_rate <= alone.hit_rate


def test_work_stays_balanced_although_all_prompts_begin_alike() -> None:
    assert run(8, Routing.PREFIX).imbalance < 1.6


def test_the_store_drops_what_was_unused_the_longest() -> None:
    store = Shared(2, takes_all=True)
    store.offer(["a", "b"], 0)
    assert 1 == store.read(["a"])
    store.offer(["c"], 0)
    assert [1, 0, 1, 0] == [store.read([key]) for key in "abc"] + [store.read([])]


def test_the_command_compares_routings_and_stores(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ids: dict[str, int] = {}
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": 1000 * request.time_s,
                    "input_length": request.input_tokens,
                    "output_length": 1,
                    "hash_ids": [ids.setdefault(str(b), len(ids)) for b in request.blocks],
                }
            )
            + "\n"
            for request in conversations(10, 5).requests
        )
    )
    options = ["--tiers", "host=50%", "--servers", "4", "--shared", "100%", "--block-tokens", "16"]
    done = CliRunner().invoke(app, ["replay", str(path), *options, "--json"])
    assert 0 == done.exit_code, done.output
    rows = json.loads(done.stdout)
    assert [("random", False), ("random", True), ("prefix", False), ("prefix", True)] == [
        (row["routing"], bool(row["shared_blocks"])) for row in rows
    ]
    shown = CliRunner().invoke(app, ["replay", str(path), *options])
    assert "prefix" in shown.stdout and "busiest" in shown.stdout
    alone = CliRunner().invoke(app, ["replay", str(path), "--shared", "1%"])
    assert 2 == alone.exit_code
