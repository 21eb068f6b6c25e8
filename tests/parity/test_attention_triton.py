"""The Triton decode kernel against the reference, in Triton's interpreter on the CPU.

Triton decides at its own import whether kernels are interpreted, so the tests below run in a child
process that sets the variable first; here they are skipped and the child's verdict is asserted.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention import AttentionOptions, PagedAttention, ReferenceAttention
from engine.batch import Span
from engine.request import SamplingParams

triton = pytest.importorskip("triton", reason="triton is not installed")

LAYERS, KV_HEADS, BLOCK = 2, 2, 16
PARAMS = SamplingParams(temperature=0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from engine import attention_triton as kernels

# Triton 3.6's interpreter turns one-element arrays into the bounds of a range. NumPy warned of that
# until 2.3 and refuses it from 2.4 on; the compiler, and later interpreters, are not concerned.
CANNOT_LOOP = triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0"

in_child = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreting child process")


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
@pytest.mark.skipif(CANNOT_LOOP, reason="this Triton's interpreter cannot loop with this NumPy")
@pytest.mark.timeout(120)
def test_the_kernel_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    if triton.__version__ < "3.7":
        command += ["-W", "ignore:Conversion of an array:DeprecationWarning"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout
    assert "20 passed" in child.stdout


def span(sequence_id: int, start: int, count: int, table: list[int], **fields: bool) -> Span:
    return Span(sequence_id, np.zeros(count, np.int32), start, table, True, PARAMS, **fields)


def run(
    attention: PagedAttention, spans: list[Span], groups: int, dim: int, options: AttentionOptions
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    total = sum(len(span.tokens) for span in spans) + 1  # one row of padding
    attention.begin(spans)
    outputs = []
    for layer in range(LAYERS):
        query = torch.randn(total, KV_HEADS * groups, dim, generator=generator)
        key, value = torch.randn(2, total, KV_HEADS, dim, generator=generator)
        outputs.append(attention.attend(layer, query, key, value, options)[: total - 1])
    attention.finish()
    return torch.cat(outputs)


@in_child
@pytest.mark.parametrize(
    ("groups", "dim", "window", "softcap", "dtype"),
    [
        (3, 32, None, None, torch.float32),
        (1, 16, None, None, torch.float32),
        (4, 24, None, None, torch.float32),  # neither a power of two nor a multiple of 16
        (3, 32, 21, None, torch.float32),
        (3, 32, None, 4.0, torch.float32),
        (3, 32, 70, 4.0, torch.bfloat16),
    ],
)
def test_decode_and_prefill_agree_with_the_reference(
    groups: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(30, LAYERS, 2, BLOCK, KV_HEADS, dim, generator=generator).to(dtype)
    pools = pool.clone(), pool.clone()
    options = AttentionOptions(scaling=dim**-0.5, window=window, softcap=softcap)
    spans = [
        span(1, 0, 1, [3]),
        span(2, 140, 1, [9, 2, 17, 4, 5, 6, 7, 8, 1]),
        span(3, 20, 5, [20, 21]),
        span(4, 15, 1, [22]),
        span(5, 16, 1, [24, 23], write_kv=False),
    ]
    expected = run(ReferenceAttention(pools[0]), spans, groups, dim, options)
    actual = run(kernels.TritonAttention(pools[1]), spans, groups, dim, options)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(pools[0], pools[1]), "both paths write the same KV"


@in_child
@pytest.mark.parametrize("window", [None, 50])
def test_a_sequence_split_over_programs_is_the_whole(window: int | None) -> None:
    """Also where the window leaves a split nothing to see."""
    generator = torch.Generator().manual_seed(2)
    pool = torch.randn(16, 2, BLOCK, KV_HEADS, 16, generator=generator)
    query = torch.randn(2, KV_HEADS * 3, 16, generator=generator)
    tables = torch.randperm(16, generator=generator).view(1, 16).repeat(2, 1).int()
    lengths = torch.tensor([250, 7], dtype=torch.int32)
    options = AttentionOptions(scaling=0.25, window=window)
    whole = kernels.decode(query, pool, tables, lengths, options, 1, 256)
    split = kernels.decode(query, pool, tables, lengths, options, 4, 64)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)


@in_child
@pytest.mark.parametrize("num_sequences", [1, 7, 300])
@pytest.mark.parametrize("longest", [1, 511, 513, 8192])
def test_splits_reach_the_longest_sequence(num_sequences: int, longest: int) -> None:
    attention = kernels.TritonAttention(torch.empty(1, LAYERS, 2, BLOCK, KV_HEADS, 16))
    num_splits, split_keys = attention._splits(num_sequences, longest)
    assert num_splits * split_keys >= longest > (num_splits - 1) * split_keys
