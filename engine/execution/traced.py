"""Records the model's forward as one graph, which runs without Python's lock.

A step of a small model makes about 2,400 short calls of torch. Each call from Python releases
Python's lock and takes it again, and there the step waits for the server's event loop. The forward
is recorded once, when the engine warms up, and is then one call, on a CPU with its attention
(`engine.attention.inside`). On a GPU it launches a prompt's kernels, which Python would do in 35 to
50 ms.

The graph makes the same calls in the same order, in the end for needed rows alone, so it computes
the same bits. This is checked before it serves. A model that cannot be recorded uses its own
forward, for example one that branches on a tensor's contents or keeps states. Engine thread only.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.base import AttentionCall, AttentionOptions, PagedAttention, attend_dense
from engine.attention.cpu import CpuAttention
from engine.attention.inside import InsideAttention
from engine.execution import fusing
from engine.torchscript import undeprecated, unoptimized

logger = logging.getLogger(__name__)

_CHECKED = ((2, 0), (3, 40), (37, 5))  # (tokens, first position) of the calls that must agree
_UNDIVIDED = 1 << 14  # numbers that torch leaves to one thread
_thread = threading.local()  # `handed`: the `_Handed` of the graph that the thread is running


def _attend(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    handed: _Handed = _thread.handed
    return handed.compute(layer, query, key, value)


_library = torch.library.Library("cachesvc", "IMPL")
for _device in ("CPU", "CUDA"):
    _library.impl("attend", _attend, _device)


class Untraceable(Exception):
    """A model's forward cannot be recorded. The message says why."""


class _Handed:
    """The `paged` of a recorded forward: a call in the graph, which comes back to `compute`. A
    layer's other arguments are the same in every step: `options`. `inside` is the compiled
    `InsideAttention` of the graph."""

    def __init__(self, inside: Any) -> None:
        self.attention: Any = _Alone()
        self.failure: BaseException | None = None
        self.inside = inside
        self.options: dict[int, AttentionOptions] = {}

    def begin(self, attention: "PagedAttention | _Alone") -> None:
        """The next step is computed with this attention."""
        self.attention = attention
        self.inside.begin(attention.inside_step() if isinstance(attention, CpuAttention) else None)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, query, key, value, options = call
        if layer in self.options:
            raise Untraceable(f"layer {layer} attends twice")
        self.options[layer] = options
        attended: torch.Tensor = torch.ops.cachesvc.attend(layer, query, key, value)
        return attended

    def compute(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        try:
            call = AttentionCall(layer, query, key, value, self.options[layer])
            attended: torch.Tensor = self.attention.attend(call)
        except BaseException as error:
            self.failure = error  # of which TorchScript would leave the text alone
            raise
        return attended

    def take_failure(self) -> BaseException | None:
        """What `attention` raised since the last call, if anything."""
        failure, self.failure = self.failure, None
        return failure


class _Alone:
    """Attention over the first tokens of one sequence, for recording and checking."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return attend_dense(call.query, call.key, call.value, 0, call.options)


@contextmanager
def _watched(model: Any) -> Iterator[list[Any]]:
    """What the layers of a model put out while it runs, as its `base_model` returns it."""
    base, outputs = model.base_model, []
    own = base.forward

    def watch(*given: Any, **named: Any) -> Any:
        outputs.append(own(*given, **named))
        return outputs[-1]

    base.forward = watch
    try:
        yield outputs
    finally:
        del base.forward


class _Forward(nn.Module):
    """The part that is recorded: from embedded tokens to logits, and to what the layers put out.
    The last input is for `fusing.leave_rows`."""

    def __init__(self, model: nn.Module, paged: _Handed) -> None:
        super().__init__()
        # torch would copy each module of a model that is one of its own: half of the recording.
        self._model = (model,)
        tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
        for number, tensor in enumerate(tensors.values()):
            self.register_buffer(f"tensor_{number}", tensor, persistent=False)
        self.inside = paged.inside  # the graph has the compiled module as its own
        self._paged = paged

    def forward(
        self, rows: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, _kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        [model] = self._model
        with _watched(model) as outputs:
            logits: torch.Tensor = model(
                inputs_embeds=rows,
                position_ids=positions,
                use_cache=False,
                paged=self._paged,
                logits_to_keep=keep,
            ).logits
        [output] = outputs
        return logits, output.last_hidden_state


class TracedForward:
    """A recorded forward. Raises Untraceable if it cannot be recorded or gives different bits.
    `fused` says whether compiled operators take the place of torch's calls.
    """

    def __init__(self, model: Any, *, fused: bool = False) -> None:
        self._embed = model.get_input_embeddings()
        self._device = self._embed.weight.device
        self.activates_by_row = False  # whether it calls none of torch's activations
        self.leaves_rows = False  # whether it computes in the end only the rows that are asked for
        self.computes_one_row = False  # whether a row alone has the bits that it has among others
        try:
            with torch.inference_mode():
                self._graph = self._record(model)
                graph = self._graph.graph
                fusing.flatten(graph, self._graph.inside, self._handed.options)
                if fused:
                    fusing.fuse(graph)
                    self.activates_by_row = fusing.activates_by_row(graph)
                    self.leaves_rows = self.activates_by_row and fusing.leave_rows(graph)
                for number, first in _CHECKED:
                    self._check(model, self._tokens(number), first)
                if fused and fusing.computes_one_row(graph):
                    self.computes_one_row = self._one_row_is_the_same()
        except Untraceable:
            raise
        except Exception as error:  # a model's code may raise anything
            raise Untraceable(repr(error)) from error

    def __call__(
        self,
        keep: torch.Tensor,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        paged: PagedAttention | _Alone,
        use_cache: bool = False,
        every_row: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        """Logits [1, K, vocabulary] after the rows `keep` [K], and what the layers put out, as the
        model's own forward gives them: of all rows if it is `every_row`, else of these at least.

        Tokens and positions are [1, T]. Raises what `paged` raises, and RuntimeError where another
        call of the graph fails.
        """
        kept = keep if len(keep) else self._numbers([0])
        if every_row:
            kept = self._numbers(range(input_ids.shape[1]))
        elif self.leaves_rows:
            keep = torch.arange(len(keep), device=self._device)
        self._handed.begin(paged)
        _thread.handed = self._handed
        rows = self._embed(input_ids)
        # Optimization passes over a graph of 3,700 nodes would take 0.7 s and gain nothing.
        try:
            with unoptimized():
                logits, states = self._graph(rows, position_ids, keep, kept)
        except RuntimeError as error:
            if (failure := self._handed.take_failure()) is not None:
                raise failure from None
            # Before its last line are pages of where in the model and on this machine.
            raise RuntimeError(str(error).strip().rpartition("\n")[2]) from error
        return logits, self._kind(last_hidden_state=states)

    def _record(self, model: Any) -> Any:
        numbers = self._numbers(range(fusing.NUM_RECORDED))
        rows, positions = self._embed(self._tokens(fusing.NUM_RECORDED)), numbers[None]
        with undeprecated() as said, _muted("transformers.modeling_utils"):
            self._handed = _Handed(torch.jit.script(InsideAttention()))
            _thread.handed = self._handed
            forward = _Forward(model, self._handed)
            example = rows, positions, self._numbers([3, 4]), numbers
            graph = torch.jit.trace(forward, example, check_trace=False, strict=False)
        for each in said:
            if each.category.__name__ == "TracerWarning":
                raise Untraceable(f"{each.filename}:{each.lineno}: {each.message}")
        return graph

    def _check(self, model: Any, tokens: torch.Tensor, first: int) -> None:
        """Compare the graph's bits with the model's own. Raises Untraceable."""
        number = tokens.shape[1]
        positions = self._numbers(range(first, first + number))[None]
        keep = self._numbers([0, number - 1])
        undivided: Any = nullcontext()
        if self.activates_by_row:
            undivided = _Undivided()  # type: ignore[no-untyped-call]
        given: dict[str, Any] = {"input_ids": tokens, "position_ids": positions, "paged": _Alone()}
        with _watched(model) as outputs, undivided:
            own = model(use_cache=False, logits_to_keep=keep, **given).logits
        self._kind = type(outputs[0])
        expected = outputs[0].last_hidden_state
        logits, output = self(keep, **given)
        if not torch.equal(own, logits):
            raise Untraceable(f"the logits of {number} tokens are others")
        if self.leaves_rows:
            expected = expected[:, keep]
        if not torch.equal(expected, output.last_hidden_state):
            raise Untraceable(f"the layers' output of {number} tokens is another")

    def _one_row_is_the_same(self) -> bool:
        """Whether a token's logits and the layers' output have the bits that they have in a step
        with a later token."""
        tokens, positions, keep = self._tokens(2), self._numbers([40, 41])[None], self._numbers([0])
        (logits, beside), (other, alone) = (
            self(keep, input_ids=tokens[:, :n], position_ids=positions[:, :n], paged=_Alone())
            for n in (2, 1)
        )
        states = beside.last_hidden_state[:, :1]
        return torch.equal(logits, other) and torch.equal(states, alone.last_hidden_state)

    def _tokens(self, number: int) -> torch.Tensor:
        """Tokens [1, number] from across the vocabulary."""
        return self._numbers(range(number))[None] * 7919 % int(self._embed.num_embeddings)

    def _numbers(self, values: Iterable[int]) -> torch.Tensor:
        """Indices on the model's device."""
        return torch.tensor([*values], device=self._device)


class _Undivided(TorchDispatchMode):
    """Has torch activate no more numbers at once than it leaves to one thread. Where it divides
    them, the last of a share have other bits, with which an operator's would be compared."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        activation = partial(function, **(kwargs or {}))
        if function not in (torch.ops.aten.silu.default, torch.ops.aten.gelu.default):
            return activation(*args)
        pieces = args[0].reshape(-1).split(_UNDIVIDED)
        return torch.cat([activation(piece) for piece in pieces]).view(args[0].shape)


@contextmanager
def _muted(name: str) -> Iterator[None]:
    """The recorder reads a model's every property. One warns of the loss, which nobody computes."""
    muted = logging.getLogger(name)
    before, muted.disabled = muted.disabled, True
    try:
        yield
    finally:
        muted.disabled = before


def trace(model: Any, *, fused: bool = False) -> TracedForward | None:
    """Record the model's forward. None if that fails, with the reason in the log."""
    if fused:
        try:
            return TracedForward(model, fused=True)
        except Untraceable as reason:
            logger.info("the compiled operators are not used: %s", reason)
    try:
        return TracedForward(model)
    except Untraceable as reason:
        logger.info("the forward is not recorded, and runs call by call: %s", reason)
        return None
