"""How many threads read the disks at once."""

import os

PER_DISK = 4  # one reads and expands 2.4 to 4.3 GB/s of KV, and an NVMe disk gives 3 to 14 GB/s
FEWEST = 2


def readers_for(num_disks: int, num_cpus: int | None = None) -> int:
    """A few for each disk, on a quarter of the processors that this process may use, as the others
    compute."""
    if num_cpus is None:
        usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        num_cpus = len(usable(0))
    return max(FEWEST, min(PER_DISK * num_disks, num_cpus // 4))
