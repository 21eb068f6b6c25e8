"""Layers with a recurrent state: Mamba, gated delta nets, KDA, lightning attention.

transformers' own modules compute them. Such a module reads its state from transformers' cache and
leaves the next one there. Here `StateCache` stands in for that cache, and `RecurrentForward` calls
the module for each sequence of a step:

    rows of the step ─► rows of a sequence, its state before ─► module ─► outputs, its state after

States are tens of MB and belong to the running sequence, outside the block pool. They are never
changed once they are kept: a call works on copies. So a step that fails leaves them as they were,
and sequences may share them. Engine thread only.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from engine.attention.base import AttentionCall, PagedAttention
from engine.attention.states import is_short_conv
from engine.batch import Span
from tiers.blocks.layout import ITEM_BYTES, StateTensor, torch_dtype


class StateName(NamedTuple):
    """One tensor of a sequence's state. A layer may have several of a kind."""

    layer: int
    kind: str  # "conv": the last rows before a convolution; "recurrent": all tokens, summarised
    number: int = 0


# A sequence's state at one position, each tensor [1, ...]. Empty at position 0. Never changed.
State = Mapping[StateName, torch.Tensor]


def tensors_of(state: State) -> tuple[StateTensor, ...]:
    """What a state consists of, in the order of a checkpoint."""
    names = {torch_dtype(name): name for name in ITEM_BYTES}
    return tuple(
        StateTensor(*name, tuple(state[name].shape[1:]), names[state[name].dtype])
        for name in sorted(state)
    )


def state_views(
    slot: torch.Tensor, tensors: Sequence[StateTensor]
) -> dict[StateName, torch.Tensor]:
    """The tensors of a checkpoint, [1, ...] each, over the memory of its slot."""
    memory = slot.view(-1).view(torch.uint8)
    views, first = {}, 0
    for tensor in tensors:
        dtype, count = torch_dtype(tensor.dtype), prod(tensor.shape)
        own = memory[first : first + count * dtype.itemsize].view(dtype).view(1, *tensor.shape)
        views[StateName(tensor.layer, tensor.kind, tensor.number)] = own
        first += tensor.nbytes
    return views


class Piece(NamedTuple):
    """The tokens of one sequence in a step: positions `[start, start + num_tokens)`."""

    sequence_id: int
    start: int
    num_tokens: int


class StateCache:
    """transformers' cache for one call of a module, over the states of B sequences.

    `after` holds the tensors that the module asked for or left, each [B, ...]. The module may
    change them, as they are copies.
    """

    def __init__(self, before: Sequence[State], pieces: Sequence[int]) -> None:
        """`pieces` are the numbers of the sequences in the step."""
        self.pieces = pieces
        self._before = before
        self.after: dict[StateName, torch.Tensor] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the sequences are at their beginning."""
        return not self._before[0]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._copied(StateName(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._copied(StateName(layer_idx, "recurrent", state_idx))

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self._copied(StateName(layer_idx, "recurrent"))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """conv_states: [B, C, T], the new rows. Returns them after the rows that are kept, and
        keeps the last `conv_kernel_size` of both."""
        name = StateName(layer_idx, "conv", state_idx)
        before = self._copied(name)
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            missing = max(0, width - conv_states.shape[-1])
            rows = nn.functional.pad(conv_states, (missing, 0))
        else:
            width = before.shape[-1]
            rows = torch.cat([before, conv_states], -1)
        self.after[name] = rows[..., -width:].clone()
        return rows

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.after[StateName(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.after[StateName(layer_idx, "recurrent")] = linear_cache

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return StateName(layer_idx, "conv", state_idx) in self._before[0]

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def _copied(self, name: StateName) -> torch.Tensor | None:
        if name not in self.after:
            if name not in self._before[0]:
                return None
            self.after[name] = torch.cat([state[name] for state in self._before])
        return self.after[name]


class RecurrentStates:
    """The states of sequences, each at its last two positions, of which a step starts at one, and
    at its last block boundary, where a checkpoint may be taken.

    A step is `begin`, then `compute` once per module in order, then `finish`. If it fails, it can
    begin again at the same positions.
    """

    def __init__(self, block_size: int = 1) -> None:
        self._block_size = block_size
        self._firsts: dict[int, int] = {}  # where the engine's step began, of each sequence
        self._kept: dict[int, dict[int, State]] = {}
        self._pieces: Sequence[Piece] = ()
        self._before: list[State] = []
        self._made: list[dict[StateName, torch.Tensor]] = []

    def begin_step(self) -> None:
        """Begin a step of the engine, which may be computed in parts."""
        self._firsts.clear()

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begin a step over these pieces, which follow one another along its rows."""
        self._pieces = pieces
        self._before = [self.at(piece.sequence_id, piece.start) for piece in pieces]
        self._made = [{} for _ in pieces]

    def holds(self, sequence_id: int, position: int) -> bool:
        """Whether the state of a sequence at that position is kept."""
        return position in self._kept.get(sequence_id, ())

    def at(self, sequence_id: int, position: int) -> State:
        """The state of a sequence after its first `position` tokens."""
        return self._kept[sequence_id][position] if position else {}

    def put(self, sequence_id: int, position: int, state: State) -> None:
        """Let a sequence continue from a state that was kept elsewhere."""
        self._kept[sequence_id] = {position: state}

    def compute(
        self, call: Callable[[torch.Tensor, StateCache], torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        """rows: [1, T, C], the step's. `call` computes [B, N, C] with the states of B sequences.
        Returns [1, T, C]. Rows of padding are zeros."""
        outputs: list[torch.Tensor] = [rows] * len(self._pieces)
        for numbers, own in self._calls(rows):
            cache = StateCache([self._before[number] for number in numbers], numbers)
            output = call(own, cache)
            for place, number in enumerate(numbers):
                outputs[number] = output[place : place + 1]
                for name, after in cache.after.items():
                    self._made[number][name] = after[place : place + 1]
        missing = rows.shape[1] - sum(piece.num_tokens for piece in self._pieces)
        if missing:
            outputs.append(outputs[0].new_zeros(1, missing, outputs[0].shape[2]))
        return torch.cat(outputs, 1)

    def _calls(self, rows: torch.Tensor) -> Iterator[tuple[list[int], torch.Tensor]]:
        """The pieces computed together, and their rows. Sequences of one token each are one call;
        the others are computed one by one."""
        decoding = []
        first = 0
        for number, (_, start, count) in enumerate(self._pieces):
            own = rows[:, first : first + count]
            first += count
            if count == 1 and start:
                decoding.append((number, own))
            else:
                yield [number], own
        if decoding:
            yield [number for number, _ in decoding], torch.cat([own for _, own in decoding])

    def finish(self) -> None:
        """Keep what the step computed."""
        for piece, before, made in zip(self._pieces, self._before, self._made, strict=True):
            end = piece.start + piece.num_tokens
            border = end - end % self._block_size
            if end == border:  # it stays longer than those with which it was computed
                made = {name: tensor.clone() for name, tensor in made.items()}
            kept = {piece.start: before, end: {**before, **made}}
            known = self._kept.get(piece.sequence_id, {})
            first = self._firsts.setdefault(piece.sequence_id, piece.start)
            for position in (first, border):
                if position in known:
                    kept.setdefault(position, known[position])
            self._kept[piece.sequence_id] = kept
        self.drop()

    def drop(self) -> None:
        """End the step, whatever it computed."""
        self._pieces, self._before, self._made = (), [], []

    def fork(self, sequence_id: int, twin_id: int) -> None:
        """Let another sequence continue from the same positions."""
        self._kept[twin_id] = dict(self._kept[sequence_id])

    def forget(self, sequence_id: int) -> None:
        self._kept.pop(sequence_id, None)


class RowRouting(Protocol):
    """Tells layers with adapters which sequences they compute."""

    pieces: Sequence[int] | None  # their numbers in the step, one for each row of B; None: all


class StatePort:
    """Where a model's modules find the states that they work on. Without, they work as ever.

    Without `runs`, a module can go on from a state by one token only.
    """

    def __init__(self) -> None:
        self.states: RecurrentStates | None = None
        self.runs = True
        self.modules: list[nn.Module] = []
        self.tensors: tuple[StateTensor, ...] = ()  # of a sequence's state, in a checkpoint's order
        self.routing: RowRouting | None = None


_CACHES = ("cache_params", "past_key_values", "cache")  # a module's parameter; the last: from 5.24


class RecurrentForward:
    """Replaces the forward of a module that keeps a state."""

    def __init__(self, module: nn.Module, port: StatePort) -> None:
        self._forward = module.forward
        self._port = port
        parameters = inspect.signature(type(module).forward).parameters
        self._cache = next((name for name in _CACHES if name in parameters), _CACHES[-1])
        # What else it must be given describes padding and positions, and is not used.
        self._unused: dict[str, Any] = {
            name: None
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and name not in ("self", "hidden_states", self._cache)
        }
        self._pair = False

    def __call__(self, hidden_states: torch.Tensor, *given: Any, **named: Any) -> Any:
        """hidden_states: [1, T, C], all rows of the step. Returns the same shape, in the form in
        which the module returns its output."""
        if self._port.states is None:
            return self._forward(hidden_states, *given, **named)
        output = self._port.states.compute(self._call, hidden_states)
        return (output, None) if self._pair else output

    def _call(self, rows: torch.Tensor, cache: StateCache) -> torch.Tensor:
        if self._port.routing is not None:
            self._port.routing.pieces = cache.pieces
        try:
            if cache.is_empty or self._port.runs:
                return self._run(rows, cache)
            return torch.cat([self._run(row, cache) for row in rows.split(1, 1)], 1)
        finally:
            if self._port.routing is not None:
                self._port.routing.pieces = None

    def _run(self, rows: torch.Tensor, cache: StateCache) -> torch.Tensor:
        output = self._forward(hidden_states=rows, **{self._cache: cache}, **self._unused)
        self._pair = isinstance(output, tuple)
        rows_out: torch.Tensor = output[0] if self._pair else output
        return rows_out


class RecurrentAttention:
    """An attention, with recurrent states beside it.

    Only some layers attend, and one module may attend in several of them. The pool keeps one layer
    for each time that a step attends, in order.
    """

    def __init__(self, attention: PagedAttention, port: StatePort, block_size: int) -> None:
        self.attention = attention
        self.states = RecurrentStates(block_size)
        self._port = port
        self._num_attended = 0

    def begin(self, spans: Sequence[Span]) -> None:
        self._port.states = self.states
        self._num_attended = 0
        self.states.begin([Piece(s.sequence_id, s.start, len(s.tokens)) for s in spans])
        self.attention.begin(spans)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        place = self._num_attended
        self._num_attended += 1
        return self.attention.attend(call._replace(layer=place))

    def finish(self) -> None:
        self.attention.finish()
        self.states.finish()

    def forget(self, sequence_id: int) -> None:
        self.attention.forget(sequence_id)
        self.states.forget(sequence_id)


def page_recurrent(model: nn.Module) -> StatePort | None:
    """Make every module with a recurrent state take it from the returned port. None if the model
    has no such module."""
    found = [
        module
        for module in model.modules()
        if _asks_for_states(module) and not is_short_conv(module)
    ]
    port = StatePort()
    for module in model.modules():
        own: Any = module
        if getattr(own, "layer_idx", 0) is None:
            own.layer_idx = -1  # it serves several layers
    port.modules = found
    for module in found:
        module.forward = RecurrentForward(module, port)
    return port if found else None


_ASKED = frozenset({"get_conv_state", "get_recurrent_state", "get_linear_cache"})


def _asks_for_states(module: nn.Module) -> bool:
    """Whether the module's own code reads a state from the cache."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not _ASKED.isdisjoint(code.co_names)
