"""How many threads read the disk at once.

Of blocks of 8 MiB in bfloat16, from the page cache, one reader loads 1.45 GB/s of KV, 2 load 2.8, 4
5.3, 8 8.6, 12 10.5 and 16 10.8 (16 processors of an Intel Xeon beside an H100, compiled joins,
2026-11; by numpy 4.3 with 4, 6.6 with 8, 8.0 with 12 and 5.6 with 16). An NVMe disk gives 3 to 14
GB/s, which are 4 to 20 of compressed KV.
"""

import os

FEWEST = 2
# Where the processors compute the model, it needs them more.
MOST, ONE_IN = 4, 4
# Elsewhere they wait. More than half leave too few to those that copy and launch, and by numpy too
# many readers are slower than few.
MOST_IDLE, ONE_IN_IDLE = 8, 2


def readers_for(*, computes_elsewhere: bool = False, num_cpus: int | None = None) -> int:
    """A few, on a share of the processors that this process may use."""
    if num_cpus is None:
        usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        num_cpus = len(usable(0))
    most = MOST_IDLE if computes_elsewhere else MOST
    one_in = ONE_IN_IDLE if computes_elsewhere else ONE_IN
    return max(FEWEST, min(most, num_cpus // one_in))
