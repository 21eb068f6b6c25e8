"""The runner: one step's spans in, one sampled token per sampling span out.

The engine thread calls `step`. All tokens of a step go through the model together, concatenated in
a single row. Attention keeps the sequences apart. Logits are computed only for positions that
choose a token.
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.base import PagedAttention, ReferenceAttention
from engine.attention.cpu import CpuAttention
from engine.attention.kv_pool import KvPool
from engine.attention.recurrent import RecurrentAttention, RecurrentStates, state_views
from engine.attention.states import StatefulAttention
from engine.batch import Batch, Sampled, Span
from engine.errors import ModelError
from engine.execution.cuda_graphs import StepGraphs, batch_sizes, cuda_graphs
from engine.execution.sampler import Sampler, target_logprobs
from engine.execution.shrinking import NO_MEMORY, Shrinking, choose_in_parts
from engine.execution.team import ThreadTeam
from engine.execution.traced import TracedForward, trace
from engine.execution.waiting import Waiting
from engine.hardware import upload
from engine.models.load import LoadedModel
from engine.models.packing import MIN_ROWS, fewest_rows
from engine.request import SamplingParams, TokenLogprob
from tiers.blocks.layout import LayerLayout, torch_dtype
from tiers.blocks.lazy_memory import LazyMemory

logger = logging.getLogger(__name__)

LOGITS_BYTES = 32 << 20  # of one piece of the prompt's logits


def pick_attention(
    pool: torch.Tensor,
    layers: Sequence[LayerLayout],
    dtype: torch.dtype,
    owners: Sequence[int] = (),
) -> PagedAttention:
    """The fastest attention for the pool's device. `dtype` is the model's compute dtype. `owners`
    are those of the pool's slots (`DevicePool.owners`)."""
    if pool.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        return CpuAttention(pool, layers, owners)
    if pool.device.type == "cuda":
        # Only CUDA builds of torch come with Triton.
        from engine.attention.triton import TritonAttention

        return TritonAttention(pool, layers)
    return ReferenceAttention(pool, layers)


class ModelRunner:
    """Runs the model over the pool.

    `pool`: `[num_blocks, *layout.shape]` of the model's layout, on the model's device. `attention`
    None picks the fastest path for the device. `scratch` is an unowned block of the pool. Without
    one, a GPU's short steps are launched kernel by kernel. `owners` are those of the pool's slots.
    With them, a working copy can serve the next prompt that begins the same way. `checkpoints` is
    the pool of those of the recurrent states, one to a row. Decode steps of up to `max_running`
    sequences are recorded as graphs, and so are tails of cached prompts.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: torch.Tensor,
        attention: PagedAttention | None = None,
        *,
        scratch: int | None = None,
        owners: Sequence[int] = (),
        checkpoints: torch.Tensor | None = None,
        max_running: int = 64,
    ) -> None:
        kv = KvPool(pool, loaded.layers)
        assert pool.shape[1:] == loaded.layout(kv.block_size).shape, pool.shape
        self._model: Any = loaded.model
        self._adapters = loaded.adapters
        self._fuses = loaded.fuses
        self._fewest_rows = MIN_ROWS
        self._vocab_size = loaded.vocab_size
        self._device = torch.device(loaded.device)
        picked = attention or pick_attention(pool, loaded.layers, torch_dtype(loaded.dtype), owners)
        self._picked = picked
        self._on_cpu = picked if isinstance(picked, CpuAttention) else None
        self._attention: PagedAttention = picked
        if kv.states:
            self._attention = StatefulAttention(picked, pool, loaded.layers)
        self._recurrent: RecurrentStates | None = None
        self._checkpoints = checkpoints
        self._tensors = loaded.port.tensors if loaded.port is not None else ()
        if loaded.port is not None:
            recurrent = RecurrentAttention(self._attention, loaded.port, kv.block_size)
            self._attention, self._recurrent = recurrent, recurrent.states
        self._sampler = Sampler(loaded.eos_token_ids)
        self._shrinking = Shrinking(kv.block_size)
        self._team = ThreadTeam(waiting=Waiting()) if self._device.type == "cpu" else None
        self._traced: TracedForward | None = None
        self._is_recorded = False
        self._captures = True  # whether graphs are of the recorded forward
        self._graphs: StepGraphs | None = None
        if scratch is not None and cuda_graphs(self._attention, self._device):
            max_blocks = -(-loaded.max_context // kv.block_size)
            self._graphs = StepGraphs(
                self._decode_logits,
                self._attention,
                min(max_blocks, len(pool)),
                block_size=kv.block_size,
                device=self._device,
                batch_sizes=batch_sizes(max_running, tails=self._attention.sees_its_step),
                scratch=scratch,
            )

    @torch.inference_mode()
    def step(self, batch: Batch) -> list[Sampled]:
        """Compute the batch's spans. Returns one `Sampled` for each, in order.

        What does not fit into memory at once is computed in parts.
        """
        if not batch.spans:
            return []
        if self._recurrent is not None:
            self._recurrent.begin_step()
        if self._team is None:
            return self._shrinking(self._step, batch.spans)
        self._team.begin(batch.num_tokens, batch.num_keys)
        try:
            return self._shrinking(self._step, batch.spans)
        finally:
            self._team.end()

    def _step(self, spans: Sequence[Span]) -> list[Sampled]:
        logits, prompt_logprobs = self._forward(spans)
        sampling = [span for span in spans if span.sample]
        chosen: Iterator[Sampled] = iter(())
        if logits is not None:
            chosen = iter(choose_in_parts(self._sampler.sample, logits, sampling))
        sampled = [next(chosen) if s.sample else Sampled(s.sequence_id, None) for s in spans]
        # Not before, because a step that fails is tried again, from the states that this replaces.
        # A graph has done it.
        self._attention.finish()
        if not prompt_logprobs:
            return sampled
        remaining = iter(prompt_logprobs)
        return [
            one._replace(targets=tuple(islice(remaining, _num_targets(span))))
            for span, one in zip(spans, sampled, strict=True)
        ]

    @property
    def lazy_memories(self) -> list[LazyMemory]:
        """The memory of working copies, to be touched ahead of need."""
        return [self._on_cpu.lazy_memory] if self._on_cpu is not None else []

    def record(self) -> None:
        """Record the model's forward, once, on any thread before steps."""
        if self._is_recorded:
            return
        self._is_recorded = True
        if self._fuses and self._on_cpu is not None:
            self._on_cpu.fuse()
        on_either = self._on_cpu is not None or self._device.type == "cuda"
        if on_either and self._recurrent is None:
            self._traced = trace(self._model, fused=self._fuses)

    @property
    def activates_by_row(self) -> bool:
        """Whether a row's activations are computed alone, however many threads there are."""
        return self._traced is not None and self._traced.activates_by_row

    def warm_up(self) -> None:
        """Load kernels once, so that the first request is not slow.

        Call it before serving: block 0 of the pool must be unowned.
        """
        self.record()
        if self._on_cpu is not None:
            self._fewest_rows = fewest_rows(self._model)
        self._try_kernels()
        if self._graphs is not None:
            self._graphs.warm_up()
            if self._traced is not None and not self._graphs.works:
                logger.warning("the recorded forward cannot be captured: graphs do without it")
                self._captures = False
                self._graphs.forget()
                self._graphs.warm_up()

    def _try_kernels(self) -> None:
        """Compile what tails and decode steps without a graph launch. Where a GPU has no room for a
        kernel, or the machine no compiler, attention does without."""
        try:
            self._try(2)
            self._try(1)
        except Exception as error:
            picked: Any = self._picked
            if not getattr(picked, "in_place", False):
                raise
            picked.give_up_kernel(error)
            self._graphs = None
            self._try(2)

    def probe(self) -> None:
        """Compute two tokens over the contents of block 0, and write nothing. Raises errors of the
        device or the model."""
        self._try(2)

    def _try(self, num_tokens: int) -> None:
        params = SamplingParams(temperature=0)
        tokens = np.zeros(num_tokens, np.int32)
        [one] = self.step(Batch([Span(-1, tokens, 0, [0], True, params, write_kv=False)]))
        self.forget(-1)
        if one.error == NO_MEMORY:
            raise ModelError(NO_MEMORY)

    def forget(self, sequence_id: int) -> None:
        """Drop data derived for this sequence. Its blocks may go to others."""
        self._attention.forget(sequence_id)
        self._sampler.forget(sequence_id)

    def fork(self, sequence_id: int, twin_id: int) -> None:
        """Let another sequence continue from the recurrent states of this one."""
        if self._recurrent is not None:
            self._recurrent.fork(sequence_id, twin_id)

    def holds(self, sequence_id: int, position: int) -> bool:
        """Whether `save` can keep the states of a sequence after its first `position` tokens."""
        return self._recurrent is not None and self._recurrent.holds(sequence_id, position)

    @torch.inference_mode()
    def save(self, sequence_id: int, position: int, slot: int) -> None:
        """Copy these states into a slot of the checkpoints."""
        assert self._recurrent is not None and self._checkpoints is not None
        state = self._recurrent.at(sequence_id, position)
        for name, view in state_views(self._checkpoints[slot], self._tensors).items():
            view.copy_(state[name])

    @torch.inference_mode()
    def resume(self, sequence_id: int, position: int, slot: int) -> None:
        """Let a sequence continue after its first `position` tokens, from a copy of a
        checkpoint."""
        assert self._recurrent is not None and self._checkpoints is not None
        views = state_views(self._checkpoints[slot], self._tensors)
        state = {name: view.clone() for name, view in views.items()}
        self._recurrent.put(sequence_id, position, state)

    def _forward(self, spans: Sequence[Span]) -> tuple[torch.Tensor | None, list[TokenLogprob]]:
        """Logits [number of sampling spans, vocabulary] in float32, or None if no span samples, and
        the log-probabilities of all spans' targets."""
        if self._graphs is not None and self._graphs.takes(spans):
            return self._graphs.run(spans), []
        lengths = [len(span.tokens) for span in spans]
        ends = np.cumsum(lengths)
        wanted = [int(end) - 1 for end, span in zip(ends, spans, strict=True) if span.sample]
        positions = [np.arange(s.start, s.start + n) for s, n in zip(spans, lengths, strict=True)]
        fewest = self._fewest(spans)
        arguments: dict[str, Any] = {
            "input_ids": self._row([span.tokens for span in spans], fewest),
            "position_ids": self._row(positions, fewest),
            "use_cache": False,
            "paged": self._attention,
        }
        logits: torch.Tensor | None = None
        prompt_logprobs: list[TokenLogprob] = []
        self._attention.begin(spans)
        self._adapters.begin(spans, arguments["input_ids"].shape[1])
        if any(span.targets is not None for span in spans):
            prompt_logprobs, logits = self._heads(spans, ends - lengths, wanted, arguments)
        elif wanted:
            rows = _at_least(fewest, np.array(wanted))
            keep = upload(rows, self._device)
            logits = self._logits(keep, arguments)[0, : len(wanted)].float()
        else:
            self._layers(arguments, every_row=False)
        self._adapters.finish()
        return logits, prompt_logprobs

    def _layers(self, arguments: dict[str, Any], *, every_row: bool) -> Any:
        """What the layers put out, of all rows if it is `every_row`."""
        if self._traced is None or self._adapters.in_use:
            return self._model.base_model(**arguments)
        none = arguments["position_ids"].new_empty(0)
        return self._traced(none, every_row=every_row, **arguments)[1]

    def _logits(self, keep: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Logits [1, K, vocabulary] after the rows `keep` [K]."""
        if self._traced is None or self._adapters.in_use:
            logits: torch.Tensor = self._model(logits_to_keep=keep, **arguments).logits
            return logits
        return self._traced(keep, **arguments)[0]

    def _heads(
        self,
        spans: Sequence[Span],
        starts: NDArray[Any],
        wanted: list[int],
        arguments: dict[str, Any],
    ) -> tuple[list[TokenLogprob], torch.Tensor | None]:
        """Run the layers once, then the head over all targets' rows.

        The head takes a few rows at a time, as the logits of a whole prompt would be gigabytes.
        Returns the values of `_forward`, swapped.
        """
        rows: list[int] = []
        targets: list[int] = []
        counts: list[int] = []
        for span, start in zip(spans, starts, strict=True):
            if span.targets is not None:
                rows += range(start, start + len(span.targets))
                targets += span.targets.tolist()
                counts += [span.params.prompt_logprobs or 0] * len(span.targets)
        states = self._layers(arguments, every_row=True)
        prompt_logprobs: list[TokenLogprob] = []
        step = max(MIN_ROWS, LOGITS_BYTES // (4 * self._vocab_size))
        for at in range(0, len(rows), step):
            logits = self._head(states, rows[at : at + step], arguments)
            prompt_logprobs += target_logprobs(
                logits, targets[at : at + step], counts[at : at + step]
            )
        return prompt_logprobs, self._head(states, wanted, arguments) if wanted else None

    def _head(self, states: Any, rows: list[int], arguments: dict[str, Any]) -> torch.Tensor:
        """Logits [len(rows), vocabulary] from the layers' output. The model's own forward computes
        them, including any work after its layers (scaling, capping)."""
        base = self._model.base_model
        base.forward = lambda *_, **__: states
        try:
            keep = upload(_at_least(self._fewest_rows, np.array(rows)), self._device)
            output = self._model(logits_to_keep=keep, **arguments)
        finally:
            del base.forward
        logits: torch.Tensor = output.logits[0, : len(rows)].float()
        return logits

    def _decode_logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocabulary] in float32 after each row. `attention` knows their sequences."""
        self._adapters.begin((), tokens.shape[1])
        given: dict[str, Any]
        given = {"input_ids": tokens, "position_ids": positions, "paged": self._attention}
        if self._traced is None or not self._captures or self._adapters.in_use:
            logits = self._model(use_cache=False, **given).logits
        else:
            keep = torch.arange(tokens.shape[1], device=tokens.device)
            logits, _ = self._traced(keep, **given)
        self._adapters.finish()
        rows: torch.Tensor = logits[0].float()
        return rows

    def _fewest(self, spans: Sequence[Span]) -> int:
        """How many rows the step has at least, so that a row has the bits it has in any other."""
        recorded = self._traced is not None and self._traced.computes_one_row
        # Updates of adapters are packed layers, and are not in the recorded forward.
        return 1 if recorded and not any(span.adapter for span in spans) else self._fewest_rows

    def _row(self, parts: Sequence[NDArray[Any]], fewest: int) -> torch.Tensor:
        """The parts concatenated as [1, T], int64, on the device. T is at least `fewest`."""
        joined = _at_least(fewest, np.concatenate(parts).astype(np.int64))
        return upload(joined, self._device)[None]


def _num_targets(span: Span) -> int:
    return len(span.targets) if span.targets is not None else 0


def _at_least(count: int, values: NDArray[Any]) -> NDArray[Any]:
    """`values`, padded to `count` with its last value. Results of the padding are unused."""
    missing = count - len(values)
    return values if missing <= 0 else np.append(values, [values[-1]] * missing)
