"""Equal bits under limits of torch's, oneDNN's and MKL's instruction sets, as on other processors.

A process reads the limits once, so each combination is a child. `tests.parity.bits` is what it
runs.
"""

import os
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.patience import ended

ROOT = Path(__file__).parents[2]
TORCH, ONEDNN = ("default", "avx2", "avx512"), ("SSE41", "AVX2", "AVX512_CORE")
# Heeded on Intel's; with SSE4.2, rows of wide heads depend on others.
MKL = ("AVX512", "AVX2", "AVX512")

pytestmark = [
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2", "AVX512"),
        reason="the limits are those of x86",
    ),
    pytest.mark.timeout(1800),
]


def differences(capability: str, isa: str, blas: str, *options: str) -> str:
    """What `tests.parity.bits` prints under these limits if it finds a difference; else empty."""
    limits = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": isa}
    limits |= {"MKL_ENABLE_INSTRUCTIONS": blas}
    limits |= {"OMP_WAIT_POLICY": "passive"}  # three threads on two busy cores spin for minutes
    environment = {"cwd": ROOT, "env": {**os.environ, **limits}, "timeout": None}
    child = ended(sys.executable, "-m", "tests.parity.bits", *options, **environment)
    return "" if child.returncode == 0 else child.stdout + child.stderr


@pytest.mark.parametrize(("capability", "isa", "blas"), list(zip(TORCH, ONEDNN, MKL, strict=True)))
def test_a_sample_has_equal_bits_under_a_limit(capability, isa, blas):
    assert differences(capability, isa, blas, "--few", "--threads", "1", "2", "3") == ""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("capability", "isa", "blas"),
    [(*each, MKL[ONEDNN.index(each[1])]) for each in product(TORCH, ONEDNN)],
)
def test_every_shape_has_equal_bits_under_every_limit(capability, isa, blas, dtype):
    assert differences(capability, isa, blas, "--every", "--dtype", dtype) == ""
