"""Attention on a CPU, over working copies of the running sequences' KV (`attention.copies`).

Same contract as `attention.ReferenceAttention`. `attention.dense` computes attention in float32,
whatever the model's dtype, in one call per part of a step and layer. Without memory for its copy, a
sequence is gathered from the pool anew for each layer. Engine thread only.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm

import torch

from engine.attention import dense
from engine.attention.agreement import needs_onednn, operator_agrees
from engine.attention.base import AttentionCall, first_seen, gather, write_span
from engine.attention.copies import WorkingCopies, WorkingCopy
from engine.attention.dense import KvPlace, StepPart, Tools, new_tools
from engine.attention.inside import InsideStep
from engine.attention.kv_pool import KvPool
from engine.batch import Span
from engine.hardware import CPU_COPIES_BYTES
from engine.torchscript import script
from tiers.blocks.layout import LayerLayout
from tiers.blocks.lazy_memory import LazyMemory

logger = logging.getLogger(__name__)

GATHERED = KvPlace(0, 0, 1, 0)


@dataclass(slots=True)
class _Part:
    """Adjacent spans, all but one of one token each, and what attention is given of them. None if
    the only span has no copy: its keys and values are gathered for each layer."""

    spans: list[Span]
    copies: list[WorkingCopy]
    first: int
    given: StepPart | None


class CpuAttention:
    """`PagedAttention` over working copies."""

    def __init__(
        self,
        pool: torch.Tensor,
        layers: Sequence[LayerLayout] = (),
        owners: Sequence[int] = (),
        *,
        budget_bytes: int = CPU_COPIES_BYTES,
    ) -> None:
        """pool, layers: as `KvPool` takes them; owners: as `WorkingCopies` does."""
        self._kv = KvPool(pool, layers)
        self._copies = WorkingCopies(self._kv, owners, budget_bytes=budget_bytes)
        self._places = _places(self._kv)
        self._step: list[_Part] = []
        self._heads: list[int] = []  # for which the compiled operator attends
        self._tools: Tools | None = None

    def begin(self, spans: Sequence[Span]) -> None:
        if self._tools is None:  # not earlier: the thread that makes them gets a team of threads
            self._tools = new_tools(onednn=self._needs_onednn())._replace(heads=self._heads)
        running = {span.sequence_id for span in spans}
        self._step = []
        opened = [(span, self._copies.open(span, running)) for span in spans]
        first = 0
        for _, group in groupby(opened, self._together):
            part = self._part(list(group), first)
            self._step.append(part)
            first += sum(len(span.tokens) for span in part.spans)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        assert self._tools is not None
        attend_part = script(dense.attend_part)
        computed, query = call.query.dtype, call.query.float()
        output = query.new_zeros(*query.shape[:2], call.value.shape[2])  # rows beyond are padding
        key, value = self._rounded(call.key), self._rounded(call.value)
        call = AttentionCall(call.layer, query, key, value, call.options)
        for part in self._step:
            given, place, rows, filled = part.given, self._places[call.layer], call, output
            if given is None:
                [span] = part.spans
                stop = part.first + len(span.tokens)
                rows, filled = call.of(slice(part.first, stop)), output[part.first : stop]
                given, place = self._gathered(span, rows), GATHERED
            attend_part(rows, given, place, self._tools, filled)
        return output.to(computed)

    def inside_step(self) -> InsideStep | None:
        """The step as a graph can compute it, if every sequence has a copy."""
        given = [part.given for part in self._step if part.given is not None]
        if self._tools is None or len(given) < len(self._step):
            return None
        return InsideStep(given, self._places, self._kv.tensor.dtype, self._tools)

    def finish(self) -> None:
        """Write the step's KV from the copies to the pool's blocks."""
        for part in self._step:
            for span, copy in zip(part.spans, part.copies, strict=False):  # or no copies at all
                self._copies.finish(copy, span)
        self._step = []

    def forget(self, sequence_id: int) -> None:
        self._copies.forget(sequence_id)

    def fuse(self) -> None:
        """From now on the compiled operator attends, for heads of which it gives the bits of
        `dense`."""
        dims = {run.shape[-1] for run in self._kv.runs if dense.suits_heads(run.shape[-1])}
        heads = [dim for dim in sorted(dims) if operator_agrees(dim)]
        for other in dims - {*heads}:
            logger.info("the compiled attention is not used for heads of %d: other bits", other)
        self._heads, self._tools = heads, None

    def _needs_onednn(self) -> bool:
        layers = (self._kv.layers[layer] for layer in self._kv.attended)
        dims = {(layer.key.shape[-1], layer.value.shape[-1]) for layer in layers}
        return any(needs_onednn(*each) for each in sorted(dims))

    @property
    def lazy_memory(self) -> LazyMemory:
        """The memory of the copies."""
        return self._copies.lazy_memory

    # The parts of a step.

    def _together(self, opened: tuple[Span, WorkingCopy | None]) -> tuple[bool, int]:
        """The key that groups adjacent spans.

        First, whether it is one token of a sequence with a copy. Adjacent spans of that kind are
        one part of the step if all or none of them write their KV.
        """
        span, copy = opened
        if len(span.tokens) == 1 and copy is not None and self._copies.uniform:
            return True, span.write_kv
        return False, span.sequence_id

    def _part(self, group: list[tuple[Span, WorkingCopy | None]], first: int) -> _Part:
        """The part of these spans, whose rows begin at `first`."""
        spans, copies = [span for span, _ in group], [copy for _, copy in group if copy is not None]
        if not copies:
            return _Part(spans, [], first, None)
        span, positions = spans[0], [span.start for span in spans]
        if not self._together(group[0])[0]:
            given = StepPart(
                first, len(span.tokens), copies[0].runs, [], None, [], span.start, span.write_kv
            )
            return _Part(spans, copies, first, given)
        written = self._copies.rows(copies, positions) if span.write_kv else None
        buffer, rows = (None, []) if written is None else (written.buffer, list(written.numbers))
        runs = [copy.runs[0] for copy in copies]
        given = StepPart(first, len(spans), runs, positions, buffer, rows, 0, span.write_kv)
        return _Part(spans, copies, first, given)

    def _gathered(self, span: Span, call: AttentionCall) -> StepPart:
        """A span without a copy, whose rows `call` has, over a run of keys and one of values."""
        if span.write_kv:
            write_span(self._kv, span, call)
        size, num_tokens = self._kv.block_size, len(span.tokens)
        unit = lcm(size, dense.PIECE)
        skipped = first_seen(span.start, call.options.window) // unit * unit
        runs = []
        for rows in gather(
            self._kv, call.layer, span.block_table, span.start + num_tokens, skipped // size
        ):
            num_keys, heads, dim = rows.shape
            run = torch.empty(1, heads, dense.padded_keys(num_keys), dim)
            run[0, :, :num_keys] = rows.transpose(0, 1)
            runs.append(run)
        return StepPart(0, num_tokens, runs, [], None, [], span.start - skipped, False)

    def _rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows, rounded as the pool rounds them."""
        return rows if rows.dtype == self._kv.tensor.dtype else rows.to(self._kv.tensor.dtype)


def _places(kv: KvPool) -> dict[int, KvPlace]:
    """For each layer, where its keys and its values are. They are in the same place if values are a
    part of the keys."""
    parts = iter(
        (number, part) for number, run in enumerate(kv.runs) for part in range(run.shape[1])
    )
    places = {}
    for layer in kv.attended:
        key = next(parts)
        value = key if kv.layers[layer].shared else next(parts)
        places[layer] = KvPlace(*key, *value)
    return places
