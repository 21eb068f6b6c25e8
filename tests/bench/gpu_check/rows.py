"""Bits of a row beside others: which paths choose a kernel by the number of rows.

On a CPU equal bits are promised, so a path that moves them fails the check. On CUDA nothing is
promised: the figures say what keeps it from being promised, with torch as it is and with its
deterministic algorithms, which order sums but do not fix the kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionCall, AttentionOptions
from engine.batch import Span
from engine.execution.runner import pick_attention
from tests.bench.gpu_check.device import BLOCK, GREEDY
from tiers.blocks.layout import LayerLayout

COUNTS = (1, 2, 3, 8, 17, 64, 130)  # of rows, of 512
HEADS, KV_HEADS, DIM = 6, 2, 64
LENGTH = 700  # tokens of a prompt; its last few are computed alone
TAILS = {"decode": 1, "short tail": 10, "longest tail in place": 64, "gathered": 200}


def check(device: str, small: bool) -> list[dict[str, Any]]:
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16)
    sizes = ((64, 96),) if small else ((576, 1536), (4096, 4096), (4096, 14336))
    figures = []
    for dtype in dtypes:
        for name, switched in (("as it is", False), ("deterministic", True)):
            with deterministic(switched):
                moved = {
                    "attention": attention_moved(device, dtype),
                    "layers": [layer_moved(device, dtype, *size) for size in sizes],
                    "reductions": reduction_moved(device, dtype),
                }
            figures.append(
                {
                    "what": f"rows in {dtype}, torch {name}",
                    "moved": moved,
                    "ok": device != "cpu" or not moved["attention"],
                }
            )
    return figures


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Torch's deterministic algorithms, where it has them."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)


def layer_moved(device: str, dtype: torch.dtype, inputs: int, outputs: int) -> list[int]:
    """For which numbers of rows a plain layer gives a row other bits than beside 511."""
    weight = _numbers((outputs, inputs), device, dtype)
    return _moved(lambda rows: torch.nn.functional.linear(rows, weight), inputs, device, dtype)


def reduction_moved(device: str, dtype: torch.dtype) -> list[int]:
    """The same for a mean over a row, as norms take it."""
    return _moved(lambda rows: rows.float().pow(2).mean(-1, keepdim=True), 576, device, dtype)


def _moved(
    compute: Callable[[torch.Tensor], torch.Tensor], width: int, device: str, dtype: torch.dtype
) -> list[int]:
    rows = _numbers((512, width), device, dtype)
    whole = compute(rows)
    return [count for count in COUNTS if not torch.equal(compute(rows[:count]), whole[:count])]


@torch.inference_mode()
def attention_moved(device: str, dtype: torch.dtype) -> list[str]:
    """The ways of computing a prompt's last tokens that give them other bits than in one chunk."""
    query = _numbers((LENGTH, HEADS, DIM), device, dtype)
    key, value = _numbers((2, LENGTH, KV_HEADS, DIM), device, dtype)
    whole = _attended(query, key, value, [LENGTH])
    found = []
    for name, count in TAILS.items():
        tail = _attended(query, key, value, [LENGTH - count, count])
        if not torch.equal(tail[-count:], whole[-count:]):
            found.append(name)
    return found


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cuts: Sequence[int]
) -> torch.Tensor:
    layer = LayerLayout(KV_HEADS, DIM, DIM)
    num_blocks = -(-LENGTH // BLOCK)
    pool = query.new_zeros(num_blocks, 1, 2, BLOCK, KV_HEADS, DIM)
    attention = pick_attention(pool, (layer,), query.dtype)
    table, outputs, start = list(range(num_blocks)), [], 0
    for count in cuts:
        rows = slice(start, start + count)
        tokens = np.zeros(count, np.int32)
        attention.begin([Span(1, tokens, start, table, True, GREEDY)])
        options = AttentionOptions(DIM**-0.5)
        outputs.append(
            attention.attend(AttentionCall(0, query[rows], key[rows], value[rows], options))
        )
        attention.finish()
        start += count
    return torch.cat(outputs)


def _numbers(shape: Sequence[int], device: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(*shape, generator=generator).to(device, dtype)
