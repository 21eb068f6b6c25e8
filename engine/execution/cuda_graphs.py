"""Short steps as CUDA graphs: decode steps, and tails of cached prompts, launched as a whole.

A step is a thousand kernels or more. Python takes 35 to 50 ms to launch those of 32 layers, and a
graph of them ran for 10 (docs/measurements/gpu.md). A graph is captured once for each of a few
numbers of rows, over tensors at fixed addresses. A step fills the tensors with one copy and replays
the graph. Each row is a token with a table of its own, so a tail of several tokens is as many rows.
Fewer rows are padded with sequences of one token in a scratch block. Padding by repeating a
sequence would repeat its attention (31 more times for the first of 33 sequences). Steps that no
graph can represent are launched kernel by kernel. Engine thread only.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeGuard

import numpy as np
import torch

from engine.attention.base import DecodeRows, PagedAttention, RecordableAttention
from engine.batch import Span
from engine.hardware import upload

logger = logging.getLogger(__name__)

_COLUMNS = 5  # columns before the table: token, position, length, block, row
_TAIL_ROWS = 128  # a question after a cached prompt, and decode steps beside it
_TAIL_KEYS = 1 << 19  # that rows of tails read, each by itself: 12 ms of a cache's bandwidth, in 8B

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Work = Callable[[], torch.Tensor]


def cuda_graphs(attention: PagedAttention, device: torch.device) -> TypeGuard[RecordableAttention]:
    """Whether decode steps can run as graphs here: only if all of one is done on the device."""
    return device.type == "cuda" and getattr(attention, "in_place", False)


def batch_sizes(max_running: int, *, tails: bool = False) -> tuple[int, ...]:
    """The sizes to record, each twice the one before, so that the largest takes `max_running`
    sequences, and with `tails` a question after a cached prompt. A row of padding costs little: a
    short step's time is that of reading the weights."""
    largest = max(max_running, _TAIL_ROWS) if tails else max_running
    return tuple(1 << power for power in range((largest - 1).bit_length() + 1))


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
        that of the longest sequence. `scratch` is an unowned block, for padding rows and for KV
        that is not to be written."""
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
        self._padding[_COLUMNS] = self._scratch = scratch
        self._works = True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record every batch size. Writes only to the scratch block."""
        for size in self._sizes:
            self._values[:size] = self._padding
            self._replay(size)

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether a graph can compute these spans, all of which sample."""
        num_rows = sum(len(span.tokens) for span in spans)
        return (
            self._works
            and num_rows <= self._sizes[-1]
            and (num_rows == len(spans) or (self._attention.sees_its_step and _few_keys(spans)))
            and all(
                span.sample and span.adapter is None and span.targets is None and not span.embedded
                for span in spans
            )
        )

    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits [len(spans), vocabulary] in float32. Read them before the next step."""
        ends = list(accumulate(len(span.tokens) for span in spans))
        size = next(size for size in self._sizes if size >= ends[-1])
        for end, span in zip(ends, spans, strict=True):
            if len(span.tokens) == 1:
                self._fill(self._values[end - 1], span)
            else:
                self._fill_tail(self._values[end - len(span.tokens) : end], span)
        self._values[ends[-1] : size] = self._padding
        logits = self._replay(size)
        if ends[-1] == len(spans):
            return logits[: len(spans)]
        return logits[upload(np.array(ends) - 1, self._device.device)]

    def _fill(self, row: np.ndarray, span: Span) -> None:
        number, place = divmod(span.start, self._block_size)
        table = span.block_table[: number + 1]
        block = table[number] if span.write_kv else self._scratch
        row[:_COLUMNS] = (span.tokens[0], span.start, span.start + 1, block, place)
        row[_COLUMNS : _COLUMNS + len(table)] = table

    def _fill_tail(self, rows: np.ndarray, span: Span) -> None:
        """Rows for a span's tokens. Each has the table of the last: it reads no key after its
        own."""
        positions = np.arange(span.start, span.start + len(rows))
        table = np.array(span.block_table[: positions[-1] // self._block_size + 1])
        rows[:, 0], rows[:, 1], rows[:, 2] = span.tokens, positions, positions + 1
        rows[:, 3] = table[positions // self._block_size] if span.write_kv else self._scratch
        rows[:, 4] = positions % self._block_size
        rows[:, _COLUMNS : _COLUMNS + len(table)] = table

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


def _few_keys(spans: Sequence[Span]) -> bool:
    """Whether the rows of tails read so few keys that reading them row by row costs less than
    launching the step."""
    read = sum(len(s.tokens) * (s.start + len(s.tokens)) for s in spans if len(s.tokens) > 1)
    return read <= _TAIL_KEYS
