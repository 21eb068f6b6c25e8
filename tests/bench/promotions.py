"""What keeping or moving promoted blocks hits and writes: `python -m tests.bench.promotions`.

The loads are seeded (`tests.support.workloads`, none names its tenants); with --trace also a trace
from a file. The command line has hit rates of one tier (`cachesvc replay`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.bench.report import arguments, tell
from tests.support.workloads import Agents, ChatLoad, Documents, Scan, Workload, make_trace
from tiers.replay.replay import TierPlan, replay
from tiers.replay.trace import Trace, read_trace

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
    parser = arguments(__doc__)
    parser.add_argument("--trace", type=Path, help="a public trace, before the made ones")
    options = parser.parse_args()
    traces = [made(name, workloads) for name, workloads in LOADS.items()]
    if options.trace:
        traces.insert(0, read_trace(options.trace))
    loads = {}
    for trace in traces:
        print(f"{trace.name}: {trace.working_set_blocks():,} distinct blocks")
        loads[trace.name] = {
            "num_requests": len(trace.requests),
            "num_accesses": trace.num_accesses,
            "working_set_blocks": trace.working_set_blocks(),
            "promotions": promotions(trace),
        }
    tell({"loads": loads}, options.json)


if __name__ == "__main__":
    main()
