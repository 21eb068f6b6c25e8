"""What packed layers keep in memory beside their weights."""

import subprocess
import sys

PROGRAM = """
import os
from pathlib import Path

import torch

from engine.models.packing import PackedLinear


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


torch.set_num_threads(1)
layers = [PackedLinear(torch.nn.Linear(width, 64)) for width in (64, 96)]
before = resident_bytes()
with torch.inference_mode():
    for rows in range(2, 500):
        for layer in layers:
            layer(torch.zeros(rows, layer.in_features))
print((resident_bytes() - before) >> 20)
"""


def test_kernels_of_many_row_counts_do_not_fill_the_memory() -> None:
    """oneDNN and ideep keep 1,024 each by default: 460 MB here, and for good."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 150
