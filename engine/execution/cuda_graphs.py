"""Decode steps as CUDA graphs: a step of one token per sequence, launched as a whole.

A decode step of a small model is a thousand kernels of a few microseconds each. Python takes longer
to launch them than they run. A graph is captured once for each of a few batch sizes, over tensors
at fixed addresses. A step fills the tensors with one copy and replays the graph. A smaller batch is
padded with sequences of one token in a scratch block. Padding by repeating a sequence would repeat
its attention (31 more times for the first of 33 sequences). Steps that no graph can represent are
launched kernel by kernel. Engine thread only.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np
import torch

from engine.attention.base import DecodeRows, PagedAttention, RecordableAttention
from engine.batch import Span

logger = logging.getLogger(__name__)

_COLUMNS = 5  # columns before the table: token, position, length, block, row

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Work = Callable[[], torch.Tensor]


def cuda_graphs(attention: PagedAttention, device: torch.device) -> TypeGuard[RecordableAttention]:
    """Whether decode steps can run as graphs here: only if all of one is done on the device."""
    return device.type == "cuda" and getattr(attention, "in_place", False)


def batch_sizes(max_running: int) -> tuple[int, ...]:
    """The sizes to record, each twice the one before, so that the largest takes `max_running`
    sequences. A row of padding costs little: a decode step's time is that of reading the
    weights."""
    return tuple(1 << power for power in range((max_running - 1).bit_length() + 1))


class Recorder:
    """Records work once and returns a function that replays it. Only on CUDA."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()  # one pool, as graphs run one at a time

    def __call__(self, work: Work) -> Work:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles kernels and fills caches, which recording forbids
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._memory):
                result = work()
        except BaseException:
            # Ending a capture that failed raises, and then torch leaves the thread on its stream.
            torch.cuda.set_stream(before)
            raise

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class DecodeGraphs:
    """`run` returns what `forward` would. A failed recording is logged and turns graphs off."""

    def __init__(
        self,
        forward: Forward,
        attention: RecordableAttention,
        max_blocks: int,
        *,
        block_size: int,
        device: torch.device,
        batch_sizes: Sequence[int],
        record: Callable[[Work], Work] | None = None,
        scratch: int,
    ) -> None:
        """`forward` maps tokens and positions [1, S] to logits [S, vocabulary]. `max_blocks` is
        that of the longest sequence. `scratch` is an unowned block for padding rows."""
        self._forward = forward
        self._attention = attention
        self._block_size = block_size
        self._record = record or Recorder()
        self._sizes = tuple(batch_sizes)
        self._replays: dict[int, Work] = {}
        shape = (self._sizes[-1], _COLUMNS + max_blocks)
        pinned = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._values = self._host.numpy()
        self._padding = np.zeros(shape[1], np.int32)
        self._padding[2:4] = 1, scratch  # one key, its own: the least work a row can do
        self._padding[_COLUMNS] = scratch
        self._works = True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record every batch size. Writes only to the scratch block."""
        for size in self._sizes:
            self._values[:size] = self._padding
            self._replay(size)

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether every span is a single decode token that a graph can compute."""
        return (
            self._works
            and len(spans) <= self._sizes[-1]
            and all(
                len(span.tokens) == 1
                and span.sample
                and span.write_kv
                and span.adapter is None
                and span.targets is None
                and not span.embedded
                for span in spans
            )
        )

    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits [len(spans), vocabulary] in float32. Read them before the next step."""
        size = next(size for size in self._sizes if size >= len(spans))
        for number, span in enumerate(spans):
            self._fill(self._values[number], span)
        self._values[len(spans) : size] = self._padding
        return self._replay(size)[: len(spans)]

    def _fill(self, row: np.ndarray, span: Span) -> None:
        number, place = divmod(span.start, self._block_size)
        table = span.block_table[: number + 1]
        row[:_COLUMNS] = (span.tokens[0], span.start, span.start + 1, table[number], place)
        row[_COLUMNS : _COLUMNS + len(table)] = table

    def _replay(self, size: int) -> torch.Tensor:
        # The previous copy has arrived, because the host has read its step's tokens since.
        self._device[:size].copy_(self._host[:size], non_blocking=True)
        if size in self._replays:
            return self._replays[size]()
        return self._first(size)

    def _first(self, size: int) -> torch.Tensor:
        def work() -> torch.Tensor:
            return self._compute(self._device[:size])

        try:
            self._replays[size] = self._record(work)
        except RuntimeError:
            logger.warning("decode steps are not recorded as CUDA graphs", exc_info=True)
            self._works = False
            return work()
        return self._replays[size]()

    def _compute(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens, positions, lengths, blocks, rows = inputs[:, :_COLUMNS].t()
        tables = inputs[:, _COLUMNS:]
        self._attention.begin_decode(
            DecodeRows(tables, lengths.contiguous(), blocks.long(), rows.long())
        )
        logits = self._forward(tokens.long()[None], positions.long()[None])
        self._attention.finish()
        return logits
