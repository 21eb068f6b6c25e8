"""Proves at start-up that paged attention computes a model exactly.

`prepare` runs the model over a few tokens, on the thread that starts the engine:

- with transformers' own attention and with ours, with each sliding window narrowed so that these
  few tokens cross its edge: the logits must agree;
- alone, in chunks, and beside sequences at other positions, on both sides of every border that the
  config names and at the end of the context: keys, values and logits must agree.

A model that fails is refused, and the error says what differed. Three forwards run all layers. The
others stop once one layer of each kind has its keys and values.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from engine.attention import base as attention
from engine.attention.latent import absorb
from engine.attention.recurrent import State, StatePort, tensors_of
from engine.attention.states import page_convolutions
from engine.errors import ModelError
from engine.models import packing
from engine.models.norms import fuse_norms
from engine.models.probe_attention import Enough, Pieces, ProbeAttention
from tiers.blocks.layout import LayerLayout

PROBE_TOKENS = 8
_HALF = PROBE_TOKENS // 2
_ALONE = ((0, 0, PROBE_TOKENS),)
_NARROW = 3  # tokens in a narrowed window
_MAX_BORDERS = 4
# In half precision each layer rounds, so a deep model's logits move by more than a fixed share.
_ROUNDINGS = 2  # times what one rounding of its input makes; attention of ours made 0.6 to 0.8
_MOST_ROUNDED = 0.1  # half the scale of scores moved them by 0.13, values in other order by 1.6
# A model without attention keeps one number a token, so that its prefixes have blocks.
NOTHING = LayerLayout(1, 1, 1, shared=True)


@torch.inference_mode()
def prepare(
    model: Any,
    max_context: int | None = None,
    port: StatePort | None = None,
    *,
    narrow: bool = False,
    watch: AbstractContextManager[object] | None = None,
) -> tuple[LayerLayout, ...]:
    """Pack the model and turn paged attention on. Returns what its layers store per token.

    `narrow`: with compiled operators, see `engine.models.packing`. With `port`, the model has
    recurrent states. Then the pool keeps a layer for each time that a forward attends. `watch` is
    entered around a paged forward of `PROBE_TOKENS` tokens.
    Raises ModelError unless every layer attends through the interface, in order, and the model's
    results equal those of transformers' own modules and attention, whatever is computed beside it.
    """
    kind = type(model).__name__
    if port is None and not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{kind} does not support transformers' attention interface")
    try:
        context = max_context or model.config.max_position_embeddings
        return _prepare(model, kind, context, port, narrow, watch or nullcontext())
    except ModelError:
        raise
    except Exception as error:  # the model's own code may raise anything
        raise ModelError(
            f"{kind} cannot be run with paged attention ({type(error).__name__}: {error})"
        ) from error


def probe_logits(model: Any, port: StatePort | None = None) -> torch.Tensor:
    """Logits [T, vocabulary] of a few tokens from position 0 on, with paged attention."""
    return _paged(model, ProbeAttention(port=port), _ALONE)


def _prepare(
    model: Any,
    kind: str,
    max_context: int,
    port: StatePort | None,
    narrow: bool,
    watch: AbstractContextManager[object],
) -> tuple[LayerLayout, ...]:
    with _narrow_windows(model) as narrowed:
        model.set_attn_implementation("eager")
        expected = _forward(model, _ALONE, position_ids=None)  # it counts them itself
        rounding = _rounding(model, expected)
        absorb(model)
        page_convolutions(model)
        if model.device.type == "cuda":
            fuse_norms(model)
        if packing.can_pack(model):
            packing.pack(model, port.modules if port is not None else (), narrow=narrow)
        model.set_attn_implementation(attention.IMPLEMENTATION)
        probe = ProbeAttention(port=port)
        with watch:
            actual = _paged(model, probe, _ALONE)
        starts = _starts(model, max_context)
        both = [(start, 0, PROBE_TOKENS) for start in sorted({0, starts[-1]})]
        beside = _paged(model, ProbeAttention(port=port), both)[:PROBE_TOKENS]
    num_layers = model.config.get_text_config().num_hidden_layers
    if port is None and probe.layers != list(range(num_layers)):
        raise ModelError(
            f"{kind} has {num_layers} layers, of which {probe.layers} came to attention: its KV "
            f"cannot be paged"
        )
    seen = f"where windows are narrowed to {_NARROW} tokens" if narrowed else ""
    what = f"gives other logits with paged attention {seen}".strip()
    _compare(model, expected, actual, what, rounding)
    if port is not None:
        _check_states(model, port, actual)
    if probe.layers:
        _check_neighbours(model, _one_of_each_kind(probe), starts, port)
    what = "gives other logits beside another sequence than alone"
    _compare(model, actual, beside, what, rounding)
    whole = _first_token(model, port) if narrowed else probe
    windows = _windows(whole, max_context) if narrowed else {}
    layouts = {layer: whole.layouts[layer] for layer in sorted(whole.layouts)} or {0: NOTHING}
    if all(layout.rows for layout in layouts.values()):
        raise ModelError(f"{kind} keeps states alone, and no keys and values: it cannot be paged")
    return tuple(
        layout if layout.rows else replace(layout, window=windows.get(layer))
        for layer, layout in layouts.items()
    )


def _check_states(model: Any, port: StatePort, alone: torch.Tensor) -> None:
    """Raise ModelError unless the model can go on from its states, beside others and alone: by
    several tokens, or at least by one at a time."""
    try:
        _compare(model, alone, _in_chunks(model, port), "goes on by several tokens")
    except ModelError:
        port.runs = False  # transformers' scan of Mamba 1 begins at no state
        _compare(
            model,
            alone,
            _in_chunks(model, port),
            "gives other logits in chunks than alone, from its states",
        )
    tensors = [tensors_of(state) for state in _states(model, port)]
    if any(each != tensors[0] for each in tensors):
        raise ModelError(f"{type(model).__name__} keeps other states after a chunk than a token")
    port.tensors = tensors[0]


def _states(model: Any, port: StatePort) -> list[State]:
    """A sequence's states after a chunk, one token more, and a chunk more."""
    probe, found, first = ProbeAttention(port=port), [], 0
    for count in (_HALF, 1, 2):
        _paged(model, probe, [(0, first, count)])
        first += count
        found.append(probe.states.at(0, first))
    return found


def _in_chunks(model: Any, port: StatePort) -> torch.Tensor:
    """The probe's logits, of a sequence that is computed in four chunks beside another."""
    probe = ProbeAttention(port=port)
    first = _paged(model, probe, [(0, 0, _HALF), (PROBE_TOKENS, 0, _HALF)])[:_HALF]
    second = _paged(model, probe, [(0, _HALF, 2), (PROBE_TOKENS, _HALF, 1)])[:2]
    third = _paged(model, probe, [(PROBE_TOKENS, _HALF + 1, 1), (0, _HALF + 2, 1)])[1:]
    last = _paged(model, probe, [(0, _HALF + 3, PROBE_TOKENS - _HALF - 3)])
    return torch.cat([first, second, third, last])


def _first_token(model: Any, port: StatePort | None) -> ProbeAttention:
    """A probe that attended from one token, with windows as wide as they are."""
    probe = ProbeAttention(port=port)
    _paged(model, probe, [(0, 0, 1)])
    return probe


def _windows(probe: ProbeAttention, max_context: int) -> dict[int, int]:
    """The window of each layer that does not see the whole context."""
    widths = {layer: options.window for layer, options in probe.options.items()}
    return {layer: width for layer, width in widths.items() if width and width < max_context}


# Alone, in chunks, and beside others.


def _check_neighbours(model: Any, last: int, starts: Sequence[int], port: StatePort | None) -> None:
    """Raise ModelError if the keys and values of a token, up to layer `last`, depend on what is
    computed beside it."""
    together = _kept(model, last, [[(start, 0, PROBE_TOKENS) for start in starts]], port)
    for start in starts:
        alone = _kept(model, last, [[(start, 0, PROBE_TOKENS)]], port)
        chunked = _kept(model, last, [[(start, 0, _HALF)], [(start, _HALF, _HALF)]], port)
        for kept, how in ((chunked, "in chunks"), (together, "beside other sequences")):
            for layer in sorted({layer for _, layer in alone}):
                for expected, actual in zip(alone[start, layer], kept[start, layer], strict=True):
                    _compare(
                        model,
                        expected.flatten(1).float(),
                        actual.flatten(1).float(),
                        f"computes other keys or values {how} than alone, at positions {start} to "
                        f"{start + PROBE_TOKENS - 1} in layer {layer}",
                    )


def _starts(model: Any, max_context: int) -> list[int]:
    """The first positions of the probed sequences: 0, half a probe before each boundary, and the
    very end."""
    config = model.config.get_text_config()
    borders = set(_lengths(getattr(config, "rope_parameters", None)))
    borders |= set(_lengths({name: getattr(config, name, None) for name in _WINDOWS}))
    borders.add(getattr(config, "original_max_position_embeddings", None) or 0)
    inner = sorted(each - _HALF for each in borders if _HALF < each <= max_context - _HALF)
    return sorted({0, *inner[-_MAX_BORDERS:], max(0, max_context - PROBE_TOKENS)})


def _lengths(parameters: Any) -> Iterator[int]:
    """The token counts in a config's dictionary and in those nested in it."""
    for value in parameters.values() if isinstance(parameters, dict) else ():
        yield from _lengths(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > PROBE_TOKENS:
            yield value


def _one_of_each_kind(probe: ProbeAttention) -> int:
    """The first layer, other than the first, up to which every kind of layer has occurred."""
    kinds = [(probe.options[layer].window, probe.layouts[layer]) for layer in probe.layers]
    last = max(kinds.index(kind) for kind in set(kinds))
    return probe.layers[min(max(last, 1), len(kinds) - 1)]


def _kept(
    model: Any, last: int, calls: Sequence[Pieces], port: StatePort | None
) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    probe = ProbeAttention(stop_after=last, port=port)
    for pieces in calls:
        try:
            _paged(model, probe, pieces)
        except Enough:
            continue
    return probe.kept


def _compare(
    model: Any, expected: torch.Tensor, actual: torch.Tensor, what: str, rounding: float = 0.0
) -> None:
    """Raise ModelError unless both are equal up to rounding. Both: [T, numbers of a token].
    `rounding` is what one rounding of its input makes of the model's output."""
    exact = model.dtype == torch.float32
    tolerance = 1e-3 if exact else max(5e-2, min(_ROUNDINGS * rounding, _MOST_ROUNDED))
    errors = _relative(expected, actual)
    chooses = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    # In half precision, two experts may have equal scores up to rounding. Then a token may take the
    # other one, but most tokens do not.
    error = errors.median() if chooses and not exact else errors.max()
    if not error <= tolerance:
        raise ModelError(
            f"{type(model).__name__} {what} (relative difference {error:.2g}, at most "
            f"{tolerance:.2g} expected)"
        )


def _relative(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """[T]: each token's largest difference, as a share of the largest number of all."""
    return (actual - expected).abs().amax(-1) / expected.abs().max().clamp_min(1e-6)


def _rounding(model: Any, expected: torch.Tensor) -> float:
    """The relative difference of the logits if the embedded tokens are rounded otherwise: by a step
    of the model's precision, up and down by turns. 0 for float32, whose tolerance has room."""
    if model.dtype == torch.float32:
        return 0.0

    def nudge(module: Any, given: Any, rows: torch.Tensor) -> torch.Tensor:
        signs = torch.ones(rows.shape[-1], dtype=rows.dtype, device=rows.device)
        signs[::2] = -1
        return rows * (1 + torch.finfo(rows.dtype).eps * signs)

    hook = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        nudged = _forward(model, _ALONE, position_ids=None)
    finally:
        hook.remove()
    return float(_relative(expected, nudged).max())


# One forward.


def _paged(model: Any, probe: ProbeAttention, pieces: Pieces) -> torch.Tensor:
    probe.take(pieces)
    try:
        return _forward(model, pieces, paged=probe)
    finally:
        probe.finish()


def _forward(model: Any, pieces: Pieces, **arguments: Any) -> torch.Tensor:
    """Logits [T, vocabulary] in float32. Every sequence has the same tokens."""
    device = model.device
    offsets = torch.cat([torch.arange(n, device=device) + offset for _, offset, n in pieces])
    starts = torch.cat([torch.full((n,), start, device=device) for start, _, n in pieces])
    tokens = (offsets + 1) * 7919 % model.config.get_text_config().vocab_size
    given = {"position_ids": (starts + offsets)[None]} | arguments
    output = model(input_ids=tokens[None], use_cache=False, **given)
    logits: torch.Tensor = output.logits
    return logits[0].float()


# Windows.

_WINDOWS = ("sliding_window", "attention_chunk_size")


@contextmanager
def _narrow_windows(model: Any) -> Iterator[bool]:
    """Narrow every window of the model's configs and modules. Yields whether there is one."""
    every = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in every if config is not None}
    holders = [*configs.values(), *model.modules()]
    found = [
        (holder, name, width)
        for holder in holders
        for name in _WINDOWS
        if isinstance(width := getattr(holder, name, None), int) and width > _NARROW
    ]
    try:
        for holder, name, _ in found:
            setattr(holder, name, _NARROW)
        yield bool(found)
    finally:
        for holder, name, width in found:
            setattr(holder, name, width)
