"""Draws tokens: temperature, truncation, choice. Engine thread only.

A token depends only on its row of logits, its parameters and its number, never on the rest of the
batch. All rows are drawn together, with at most one wait for the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from engine.hardware import upload
from engine.request import SamplingParams

NUCLEUS = 1024  # candidates considered before a whole row is sorted
_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1). The same seed and position give the same number on every machine."""
    return (mix(mix(seed & _MASK64) + position) >> 11) * 2.0**-53


def mix(state: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
    return state ^ (state >> 31)


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> torch.Tensor:
    """Tokens [R] drawn from logits [R, V] at the uniform `numbers`. Each row's token is as if
    alone.

    Any logits are safe. The token of a row that has NaN, or only -inf, is meaningless.
    """
    device = logits.device
    probabilities = _probabilities(logits, params)
    truncated = [row for row, p in enumerate(params) if _is_truncated(p, logits.shape[1])]
    plain = [row for row, p in enumerate(params) if not _is_truncated(p, logits.shape[1])]
    chosen = torch.empty(len(params), dtype=torch.int64, device=device)
    if plain:
        rows = upload(np.array(plain), device)
        chosen[rows] = _invert(probabilities[rows], [numbers[row] for row in plain])
    if truncated:
        rows = upload(np.array(truncated), device)
        weights, tokens = candidates(probabilities[rows], [params[row] for row in truncated])
        # Drawn in the order of ids: that of nearly equal weights depends on the last bits.
        tokens, order = torch.sort(tokens, -1)
        weights = weights.gather(1, order)
        places = _invert(weights, [numbers[row] for row in truncated])
        chosen[rows] = tokens.gather(1, places[:, None])[:, 0]
    return chosen


def _probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """softmax(logits / temperature), [R, V]. No overflow, as the largest is 0 before the
    division."""
    temperature = upload(np.array([p.temperature for p in params], np.float32), logits.device)
    finite = logits.clamp(max=torch.finfo(logits.dtype).max)
    shifted = finite - finite.amax(-1, keepdim=True)
    return torch.softmax(shifted / temperature[:, None], -1)


def _is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size or params.min_p > 0.0


def candidates(
    probabilities: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that min_p, top_k and top_p leave of each row: (weights, ids), likeliest first.

    probabilities: [R, V]; weights and ids: [R, K], with weight 0 for removed ones. top_p keeps the
    fewest candidates whose mass, among those left by top_k and min_p, reaches it.
    """
    vocab_size = probabilities.shape[1]
    best, first_ids = torch.topk(probabilities, min(NUCLEUS, vocab_size))
    first, enough = _truncated(best, params, vocab_size)
    if best.shape[1] == vocab_size or bool(enough.all()):
        return first, first_ids
    best, ids = torch.sort(probabilities, descending=True, stable=True)
    weights, _ = _truncated(best, params, vocab_size)
    # A row that needed no more keeps its first result, so that it does not depend on the others.
    missing, keep = (0, vocab_size - NUCLEUS), enough[:, None]
    return (
        torch.where(keep, pad(first, missing), weights),
        torch.where(keep, pad(first_ids, missing), ids),
    )


def _truncated(
    best: torch.Tensor, params: Sequence[SamplingParams], vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [R, K] of the likeliest candidates `best`, and whether these are all that are needed.

    Rows with more candidates than K are known to sum to 1.
    """
    device, num = best.device, best.shape[1]
    limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    limit = upload(np.array(limits), device)[:, None]
    top_p = upload(np.array([p.top_p for p in params]), device)[:, None]
    min_p = upload(np.array([p.min_p for p in params], np.float32), device)[:, None]
    inside = (torch.arange(num, device=device) < limit) & (best >= min_p * best[:, :1])
    weights = best * inside
    mass = weights.double().cumsum(1)
    complete = (limit <= num) | ~inside[:, -1:]
    whole = torch.where(complete, mass[:, -1:], 1.0)
    reached = (top_p < 1.0) & (min_p == 0.0) & (limit == vocab_size) & (mass[:, -1:] >= top_p)
    before = pad(mass[:, :-1], (1, 0))  # mass of the earlier ones
    kept = weights * ((top_p >= 1.0) | (before < top_p * whole))
    return kept, (complete | reached)[:, 0]


def _invert(weights: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """For each row, the index at which the cumulative weight first exceeds number * total."""
    mass = weights.double().cumsum(-1)
    targets = upload(np.array(numbers, np.float64), weights.device)[:, None]
    found = torch.searchsorted(mass, targets * mass[:, -1:], right=True)[:, 0]
    last = torch.searchsorted(mass, mass[:, -1:].contiguous())[:, 0]  # last one with any weight
    return torch.minimum(found, last).clamp_max(weights.shape[1] - 1)  # a NaN row has no last
