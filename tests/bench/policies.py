"""Hit rate and cost of each policy on several loads: `python tests/bench/policies.py`.

Token hit rates at 1, 5, 10 and 25 per cent of each trace's distinct blocks, the microseconds a
block use costs in the replay, and what keeping or moving promoted blocks hits and writes. The
loads are seeded (`tests.support.workloads`, none names its tenants); with --trace also a trace from
a file.

Estimate before the first run: an ordered dict takes 0.2 us a call and a block use makes two or
three, so 0.5 us for LRU, 1 us for the queues, 3 us for a heap; adaptive spends 100 us of numpy
calls on a request of 20 blocks, so 5 to 8 us a block.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.provenance import commit, machine
from tests.support.workloads import Agents, ChatLoad, Documents, Scan, Workload, make_trace
from tiers.policy.names import PolicyName
from tiers.replay.replay import MIN, TierPlan, replay
from tiers.replay.trace import Trace, read_trace

SHARES = (0.01, 0.05, 0.10, 0.25)
TIERS = {"1/5/25": (0.01, 0.05, 0.25), "1/9/90": (0.01, 0.09, 0.90), "2/4/8": (0.02, 0.04, 0.08)}
LOADS: dict[str, list[Workload]] = {
    "chat": [ChatLoad(1.0)],
    "slow chat": [ChatLoad(1.0, go_on=0.7, think_s=300.0)],
    "agents and a scan": [Agents(0.1), Scan(1.0)],
    "documents that change": [Documents(3.0, num_documents=2000, shift_s=900.0)],
    "all at once": [ChatLoad(0.5), Agents(0.05), Scan(0.5), Documents(0.5)],
    "a burst of scans": [
        ChatLoad(0.5), Scan(4.0, start_s=1200.0, end_s=1800.0), Documents(1.0, shift_s=1800.0),
    ],
}  # fmt: skip


def made(name: str, workloads: Sequence[Workload]) -> Trace:
    """An hour of a load, without its tenants' names: public traces have none."""
    trace = make_trace(name, workloads, duration_s=3600.0, seed=1)
    return replace(trace, requests=[replace(each, tenant=None) for each in trace.requests])


def sweep(trace: Trace, names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Per policy: hit rates at `SHARES`, and microseconds a block use."""
    working_set = trace.working_set_blocks()
    found: dict[str, dict[str, object]] = {}
    for name in names:
        start = time.perf_counter()
        plans = [TierPlan("cache", max(1, round(share * working_set)), name) for share in SHARES]
        rates = [round(replay(trace, [plan]).hit_rate, 4) for plan in plans]
        spent_us = (time.perf_counter() - start) * 1e6 / len(SHARES) / trace.num_accesses
        found[name] = {"hit_rates": rates, "us_per_use": round(spent_us, 2)}
        print(f"  {name:12}", *(f"{rate:.4f}" for rate in rates), f"{spent_us:6.2f} us", flush=True)
    return found


def promotions(trace: Trace) -> dict[str, dict[str, object]]:
    """Per sizes and what becomes of copies below: hit rate, and blocks written to host and disk."""
    working_set = trace.working_set_blocks()
    found: dict[str, dict[str, object]] = {}
    for sizes, shares in TIERS.items():
        tiers = zip(("device", "host", "disk"), shares, strict=True)
        plans = [TierPlan(tier, max(1, round(share * working_set))) for tier, share in tiers]
        for name, keeps in (("keep", True), ("move", False), ("rule", None)):
            result = replay(trace, plans, keeps=keeps)
            found[f"{sizes} {name}"] = {
                "hit_rate": round(result.hit_rate, 4),
                "host_writes": result.tiers[1].written_blocks,
                "disk_writes": result.tiers[2].written_blocks,
            }
            print(f"  {sizes} {name:5}", *found[f"{sizes} {name}"].values(), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=None)
    parser.add_argument("--policy", default=",".join([*PolicyName, MIN]))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    traces = [made(name, workloads) for name, workloads in LOADS.items()]
    if options.trace:
        traces.insert(0, read_trace(options.trace))
    loads = {}
    for trace in traces:
        print(f"{trace.name}: {trace.working_set_blocks():,} distinct blocks at {SHARES}")
        loads[trace.name] = {
            "num_requests": len(trace.requests),
            "num_accesses": trace.num_accesses,
            "working_set_blocks": trace.working_set_blocks(),
            "policies": sweep(trace, options.policy.split(",")),
            "promotions": promotions(trace),
        }
    if options.json:
        report = {
            "commit": commit(),
            "machine": machine(),
            "shares": SHARES,
            "loads": loads,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
