"""Scores in half precision: every way that a span may go, against float32 on the same numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from engine.attention import base
from engine.batch import Span
from engine.execution.cuda_graphs import Recorder
from engine.execution.runner import pick_attention
from tests.bench.gpu_check.device import BLOCK, GREEDY
from tiers.blocks.layout import LayerLayout

TOLERANCE = 0.03  # bfloat16 keeps 8 bits of a sum of values around 1
KV_HEADS = 2


@dataclass(frozen=True, slots=True)
class Case:
    groups: int
    dim: int
    window: int | None
    softcap: float | None
    sinks: bool = False
    rank: int | None = None  # of latents, which all heads share; `dim` has the rotated key too

    @property
    def kv_heads(self) -> int:
        return KV_HEADS if self.rank is None else 1


def check(device: str, small: bool) -> list[dict[str, Any]]:
    groups, dims = ((3,), (64,)) if small else ((3, 4, 8), (64, 128, 256))
    shapes = product(groups, dims, (None, 100), (None, 30.0))
    latents = ((20, 40, 32),) if small else ((128, 576, 512), (16, 576, 512), (40, 288, 256))
    cases = [Case(*shape) for shape in shapes]
    cases += [Case(heads, dim, None, None, rank=rank) for heads, dim, rank in latents]
    cases += [Case(8, 64, window, None, sinks=True) for window in (None, 128)]  # gpt-oss
    return [_of(case, device) for case in cases]


def _of(case: Case, device: str) -> dict[str, Any]:
    spans = {
        "decode": [_span(0, 0, 1, 0), _span(1, 700, 1, 1), _span(2, 129, 1, 12)],
        "short": [_span(0, 690, 10, 0), _span(1, 3, 64, 12)],
        "long": [_span(0, 500, 130, 0), _span(1, 0, 200, 12)],
    }
    errors = {name: _error(case, device, some) for name, some in spans.items()}
    if device == "cuda":
        errors["graph"] = _error(case, device, spans["decode"], record=True)
    return {
        "what": f"{case}",
        "largest_error": {name: round(error, 5) for name, error in errors.items()},
        "ok": max(errors.values()) < TOLERANCE,
    }


def _span(number: int, start: int, count: int, first_block: int) -> Span:
    table = list(range(first_block, first_block + (start + count - 1) // BLOCK + 1))
    return Span(number, np.zeros(count, np.int32), start, table, True, GREEDY)


def _error(case: Case, device: str, spans: Sequence[Span], *, record: bool = False) -> float:
    """The largest difference between bfloat16 by the device's path and float32 by the reference."""
    generator = torch.Generator().manual_seed(7)
    rows = sum(len(span.tokens) for span in spans)
    heads = case.kv_heads
    shape = (30, 1, 2 if case.rank is None else 1, BLOCK, heads, case.dim)
    layers = () if case.rank is None else (LayerLayout(1, case.dim, case.rank, shared=True),)
    pool = torch.randn(shape, generator=generator).bfloat16()
    query = torch.randn(rows, heads * case.groups, case.dim, generator=generator).bfloat16()
    key, value = torch.randn(2, rows, heads, case.dim, generator=generator).bfloat16()
    if case.rank is not None:
        value = key[..., : case.rank]
    num_heads = heads * case.groups
    sinks = torch.linspace(-2, 3, num_heads) if case.sinks else None
    options = base.AttentionOptions(case.dim**-0.5, case.window, case.softcap, sinks)
    exact = base.ReferenceAttention(pool.float(), layers)
    exact.begin(spans)
    expected = exact.attend(
        base.AttentionCall(0, query.float(), key.float(), value.float(), options)
    )
    if sinks is not None:
        options = options._replace(sinks=sinks.to(device, torch.bfloat16))
    there = pool.to(device)
    path = pick_attention(there, layers, torch.bfloat16)
    on_device = [each.to(device) for each in (query, key, value)]

    def attend() -> torch.Tensor:
        if record:
            _begin_decode(path, spans, device)
        else:
            path.begin(spans)
        result = path.attend(base.AttentionCall(0, *on_device, options))
        path.finish()
        return result

    actual = Recorder()(attend)() if record else attend()
    return float((actual.float().cpu() - expected).abs().max())


_INPUTS: list[torch.Tensor] = []  # a graph reads them where they were when it was recorded


def _begin_decode(path: base.PagedAttention, spans: Sequence[Span], device: str) -> None:
    if not torch.cuda.is_current_stream_capturing():
        width = max(len(span.block_table) for span in spans)
        tables = torch.zeros(len(spans), width, dtype=torch.int32)
        for row, span in enumerate(spans):
            tables[row, : len(span.block_table)] = torch.tensor(span.block_table)
        starts = torch.tensor([span.start for span in spans])
        last = torch.tensor([span.block_table[span.start // BLOCK] for span in spans])
        given = (tables, (starts + 1).int(), last, starts % BLOCK)
        _INPUTS[:] = [each.to(device) for each in given]
    assert hasattr(path, "begin_decode")
    path.begin_decode(base.DecodeRows(*_INPUTS))
