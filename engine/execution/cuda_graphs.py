"""Short steps as CUDA graphs: decode steps, and tails of cached prompts, launched as a whole.

A step is a thousand kernels or more. Python takes 35 to 50 ms to launch those of 32 layers, and a
graph of them ran for 10 (docs/measurements/gpu.md). A graph is captured once for each of a few
sizes, over tensors at fixed addresses (`execution.grouped_rows`). A step fills the tensors with one
copy and replays the graph. Steps that no graph can represent are launched kernel by kernel. Engine
thread only.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np
import torch

from engine.attention.base import SHORT_TAIL, TAIL_QUERIES, PagedAttention, RecordableAttention
from engine.batch import Span
from engine.execution.grouped_rows import GroupedRows
from engine.hardware import upload

logger = logging.getLogger(__name__)

_TAIL_ROWS = 128  # a question after a cached prompt, and decode steps beside it
# A launched step reads a short tail by eights too, and the keys of a longer one once. What a graph
# reads more than that takes 20 to 30 ms of 8B on an H100, at most, as do the launches of a step.
_MOST_KEYS = 1 << 19

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Work = Callable[[], torch.Tensor]


def cuda_graphs(attention: PagedAttention, device: torch.device) -> TypeGuard[RecordableAttention]:
    """Whether short steps can run as graphs here: only if all of one is done on the device."""
    return device.type == "cuda" and getattr(attention, "in_place", False)


def batch_sizes(max_running: int, *, tails: bool = False) -> tuple[int, ...]:
    """The sizes to record, each twice the one before, so that the largest takes `max_running`
    sequences, and with `tails` a question after a cached prompt. A row of padding costs little: a
    short step's time is that of reading the weights."""
    return _sizes_to(max(max_running, _TAIL_ROWS) if tails else max_running)


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
            # Ending a capture that failed raises. Then torch leaves the thread on its stream, and
            # random numbers count for a capture: the next flash attention would be refused.
            torch.cuda.set_stream(before)
            _end_random_capture()
            raise

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def _end_random_capture() -> None:
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


class StepGraphs:
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
        """`forward` maps tokens and positions [1, R] to logits [R, vocabulary]. `max_blocks` is
        that of the longest sequence. `scratch` is an unowned block, for padding rows and for KV
        that is not to be written."""
        self._forward = forward
        self._attention = attention
        self._device = device
        self._given = record
        self.forget()

        def rows(width: int, sizes: Sequence[int]) -> GroupedRows:
            return GroupedRows(
                width, sizes, max_blocks, block_size=block_size, scratch=scratch, device=device
            )

        self._singles = rows(1, batch_sizes)
        self._tails = rows(TAIL_QUERIES, _sizes_to(_TAIL_ROWS // TAIL_QUERIES))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record every size. Writes only to the scratch block."""
        kinds = [self._singles]
        if self._attention.sees_its_step:
            kinds.append(self._tails)
        for rows in kinds:
            for size in rows.sizes:
                rows.pad(size)
                self._replay(rows, size)

    def forget(self) -> None:
        """Record anew from now on. The memory of graphs that are gone takes no others."""
        self._record = self._given or Recorder()
        self._replays: dict[tuple[int, int], Work] = {}
        self._works = True

    @property
    def works(self) -> bool:
        """Whether no recording has failed."""
        return self._works

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether a graph can compute these spans, all of which sample."""
        return (
            self._works
            and self._rows_of(spans) is not None
            and all(span.sample and span.adapter is None and span.targets is None for span in spans)
        )

    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits [len(spans), vocabulary] in float32. Read them before the next step."""
        rows = self._rows_of(spans)
        assert rows is not None, "run without takes"
        size, lasts = rows.fill(spans)
        logits = self._replay(rows, size)
        if lasts[-1] == len(spans) - 1:
            return logits[: len(spans)]
        return logits[upload(np.array(lasts), self._device)]

    def _rows_of(self, spans: Sequence[Span]) -> GroupedRows | None:
        """What can hold the step: tails in groups, unless so many sequences decode beside them that
        each row must be a group."""
        if all(len(span.tokens) == 1 for span in spans):
            return self._singles if len(spans) <= self._singles.sizes[-1] else None
        if not self._attention.sees_its_step:
            return None
        for rows, longer_than in ((self._tails, SHORT_TAIL), (self._singles, 1)):
            if rows.holds(spans) and rows.num_keys(spans, longer_than) <= _MOST_KEYS:
                return rows
        return None

    def _replay(self, rows: GroupedRows, size: int) -> torch.Tensor:
        key = rows.width, size
        if key not in self._replays:
            return self._first(rows, size)
        return self._replays[key]()

    def _first(self, rows: GroupedRows, size: int) -> torch.Tensor:
        def work() -> torch.Tensor:
            return self._compute(rows, size)

        try:
            self._replays[rows.width, size] = replay = self._record(work)
        except RuntimeError:
            logger.warning("short steps are not recorded as CUDA graphs", exc_info=True)
            self._works = False
            return work()
        return replay()

    def _compute(self, rows: GroupedRows, size: int) -> torch.Tensor:
        tokens, positions, decode = rows.read(size)
        self._attention.begin_decode(decode)
        logits = self._forward(tokens, positions)
        self._attention.finish()
        return logits


def _sizes_to(largest: int) -> tuple[int, ...]:
    """Powers of two, of which the last is at least `largest`."""
    return tuple(1 << power for power in range((largest - 1).bit_length() + 1))
