"""A decode step of short sequences and one long one.

Of 33 sequences in a decode step of an 8B-shaped model, one of 32k tokens reads 4 GB of KV more, 0.9
ms at 4.8 TB/s; filling the batch up to 64 should cost nothing that can be seen.
"""

from typing import Any

import numpy as np

from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from tests.bench.gpu_check.device import BLOCK, GREEDY, TINY, random_model, shape, timed
from tests.support.models import described
from tiers.memory.device import DevicePool

MOST_SLOWED = 1.5  # by one sequence of 32k tokens among 33


def check(device: str, small: bool) -> dict[str, Any]:
    """Milliseconds of a decode step: 32 sequences, 33, and 33 of which the first is long."""
    long, short = (512, 64) if small else (32 << 10, 128)
    config = TINY if small else shape(8, 4096, 32, 8, 14336, 2 * long)
    loaded = described("random", random_model(config, device), device=device)
    per_short = short // BLOCK + 1
    first = list(range(long // BLOCK + 1))
    num_blocks = len(first) + 33 * per_short
    pool = DevicePool(loaded.layout(BLOCK), num_blocks, device)
    runner = ModelRunner(loaded, pool.tensor, scratch=pool.scratch)
    runner.warm_up()
    token = np.ones(1, np.int32)
    tables = [[len(first) + n * per_short + i for i in range(per_short)] for n in range(33)]
    shorts = [Span(n, token, short, table, True, GREEDY) for n, table in enumerate(tables)]
    batches = {
        "32_short": shorts[:32],
        "33_short": shorts,
        "33_one_long": [Span(99, token, long, first, True, GREEDY), *shorts[:32]],
    }
    times: dict[str, Any] = {
        name: round(timed(device, lambda some=spans: runner.step(Batch(some))) * 1e3, 3)
        for name, spans in batches.items()
    }
    slower = times["33_one_long"] / times["33_short"]
    what = f"a long sequence slows its batch {slower:.2f} times, {MOST_SLOWED} at most"
    return times | {"what": what, "ok": device != "cuda" or slower <= MOST_SLOWED}
