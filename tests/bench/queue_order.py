"""What the order of the waiting queue serves from the cache, on a trace, in simulated time.

    python -m tests.bench.queue_order --trace FILE [--json FILE]

The scheduler and the cache are the engine's; a step takes 20 ms and what its prefill takes at a
rate. At the lowest rate the server cannot keep up, at the highest it hardly queues. Expected: an
order by arrival hits what LRU hits whatever the rate; longest cached first hits more the longer the
queue is, since a prefix's requests come together, and so works the queue off sooner.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.provenance import commit
from tests.support.simulation import SimulatedRun, SimulatedServer, simulate
from tiers.replay.trace import read_trace

CAPACITIES = (4_000, 10_000)  # blocks of the trace, 512 tokens each
RATES = (40_000, 60_000, 80_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, help="only so many, from the first on")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    trace = replace(trace, requests=trace.requests[: options.requests])
    rows = []
    for capacity in CAPACITIES:
        for rate in RATES:
            for by_arrival in (True, False):
                server = SimulatedServer(
                    capacity_blocks=capacity, prefill_tokens_per_s=rate, by_arrival=by_arrival
                )
                rows.append(_row(server, simulate(trace, server)))
                print(*rows[-1].values(), flush=True)
    figures = {"commit": commit(), "trace": trace.name, "requests": len(trace.requests)}
    if options.json:
        options.json.write_text(json.dumps({**figures, "rows": rows}, indent=1) + "\n")


def _row(server: SimulatedServer, run: SimulatedRun) -> dict[str, Any]:
    waits = sorted(one.waited_s for one in run.served)
    return {
        "capacity_blocks": server.capacity_blocks,
        "prefill_tokens_per_s": server.prefill_tokens_per_s,
        "order": "arrival" if server.by_arrival else "cached_first",
        "hit_rate": round(run.hit_rate, 4),
        "wait_s_mean": round(statistics.fmean(waits), 2),
        "wait_s_p99": round(waits[len(waits) * 99 // 100], 2),
        "wait_s_max": round(waits[-1], 2),
        "passed_by_s_max": round(run.passed_by_s(), 3),
        "seconds": round(run.seconds),
    }


if __name__ == "__main__":
    main()
