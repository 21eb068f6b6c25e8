"""Memory is taken as it is used: caches of gigabytes cost a server little at its start."""

import subprocess
import sys

import pytest

MEASURE = """
import resource
from engine.attention.copies import WorkingCopies
from engine.attention.kv_pool import KvPool
from tiers.blocks.layout import BlockLayout
from tiers.memory.device import DevicePool

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

layout = BlockLayout.uniform(
    num_layers=4, block_size=64, num_kv_heads=4, head_dim=64, dtype="float32"
)
before = resident()
pool = DevicePool(layout, (512 << 20) // layout.nbytes)
copies = WorkingCopies(KvPool(pool.tensor), budget_bytes=512 << 20)
made = resident() - before
pool.touch(64 << 20)
copies.warm_up(1 << 20)
print(made, resident() - before, float(pool.tensor[-1].abs().max()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_pool_and_working_copies_take_memory_as_they_are_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    made, touched, last = map(float, done.stdout.split())
    assert made < 50
    assert 150 < touched < 300, "64 MiB of the pool, 128 of the copies"
    assert last == 0
