"""From logits to tokens: penalties, bias, temperature, truncation, choice.

Engine thread. A token depends on its own row of logits, its span and its seed alone, never on what
else is in the batch: randomness is one uniform number per token, hashed from (seed, position), and
the choice is the inverse of the row's cumulative distribution at that number.
"""

import math
import secrets
from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Sampled, Span
from engine.errors import InvalidParameter
from engine.request import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5  # temperatures under this are greedy; dividing by them overflows float32
MAX_LOGPROBS = 20  # OpenAI, API reference, `top_logprobs`
_NUCLEUS = 1024  # candidates looked at before the whole vocabulary is sorted for top_p
_MASK64 = (1 << 64) - 1


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidParameter, naming the field as OpenAI names it, for a value out of its range."""
    for field, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("repetition_penalty", 0.0, math.inf),
    ):
        value = getattr(params, field)
        if not (low <= value <= high and math.isfinite(value)):
            raise _out_of_range(field, value, f"from {low:g} to {high:g}")
    for field in ("top_p", "repetition_penalty"):
        if getattr(params, field) == 0:
            raise _out_of_range(field, 0, "above 0")
    _check_counts(params)
    _check_tokens(params, vocab_size)


def _check_counts(params: SamplingParams) -> None:
    for field, low in (("n", 1), ("top_k", 0), ("min_tokens", 0)):
        if getattr(params, field) < low:
            raise _out_of_range(field, getattr(params, field), f"at least {low}")
    if params.max_tokens is not None:
        if params.max_tokens < 0:
            raise _out_of_range("max_tokens", params.max_tokens, "at least 0")
        if params.min_tokens > params.max_tokens:
            raise _out_of_range(
                "min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})"
            )
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise _out_of_range(field, value, f"from 0 to {MAX_LOGPROBS}")


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise _out_of_range("logit_bias", token, f"a token id below {vocab_size}")
        if not -100 <= bias <= 100:
            raise _out_of_range("logit_bias", bias, "a bias from -100 to 100")
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise _out_of_range("stop_token_ids", token, f"a token id below {vocab_size}")


def _out_of_range(field: str, value: object, expected: str) -> InvalidParameter:
    return InvalidParameter(f"{field} is {value}; it must be {expected}", param=field)


class Sampler:
    """Chooses tokens. Keeps no state between steps but the entropy for requests without a seed."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._entropy = secrets.randbits(64)

    def sample(self, logits: torch.Tensor, spans: Sequence[Span]) -> list[Sampled]:
        """One token for each span. logits: [len(spans), vocabulary], float32; not changed."""
        adjusted = self._adjusted(logits, spans)
        chosen = adjusted.argmax(-1)
        drawn = [row for row, span in enumerate(spans) if not is_greedy(span.params)]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            picked = draw(
                adjusted[rows],
                [spans[row].params for row in drawn],
                [self._uniform(spans[row]) for row in drawn],
            )
            chosen[rows] = picked
        tokens: list[int] = chosen.tolist()
        return [
            Sampled(span.sequence_id, token, _logprob(logits[row], token, span.params.logprobs))
            for row, (span, token) in enumerate(zip(spans, tokens, strict=True))
        ]

    def _uniform(self, span: Span) -> float:
        seed = span.params.seed
        if seed is None:
            return uniform(self._entropy ^ _mix(span.sequence_id), span.sampled_before)
        return uniform(seed, span.sampled_before)

    def _adjusted(self, logits: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Logits after bias, penalties and masks; the same tensor when no span asks for any."""
        adjusted = logits
        for row, span in enumerate(spans):
            forbidden = self._forbidden(span)
            if not (forbidden or span.allowed is not None or _is_adjusted(span.params)):
                continue
            if adjusted is logits:
                adjusted = logits.clone()
            adjust(adjusted[row], span)
            if forbidden:
                adjusted[row, forbidden] = -math.inf
        return adjusted

    def _forbidden(self, span: Span) -> list[int]:
        """Ids that would end the sequence before `min_tokens`; a grammar's mask sees to it."""
        if span.sampled_before >= span.params.min_tokens or span.allowed is not None:
            return []
        return [*self._eos_token_ids, *span.params.stop_token_ids]


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def _is_adjusted(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def adjust(row: torch.Tensor, span: Span) -> None:
    """Apply penalties, bias and the span's mask to one row of logits, in place.

    Presence and frequency count generated tokens only (OpenAI); repetition divides positive and
    multiplies negative logits of every token seen, prompt included (Keskar et al. 2019, CTRL, 4.1).
    """
    params = span.params
    if params.repetition_penalty != 1.0 and span.history is not None:
        seen = _ids(np.unique(span.history), row.device)
        scores = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if (params.presence_penalty or params.frequency_penalty) and span.history is not None:
        tokens, counts = np.unique(span.history[span.num_prompt_tokens :], return_counts=True)
        weights = torch.from_numpy(counts).to(device=row.device, dtype=row.dtype)
        row[_ids(tokens, row.device)] -= (
            params.presence_penalty + params.frequency_penalty * weights
        )
    if params.logit_bias:
        tokens = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        biases = torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
        row[_ids(tokens, row.device)] += biases
    if span.allowed is not None:
        bits = np.unpackbits(span.allowed.view(np.uint8), bitorder="little")[: row.shape[0]]
        allowed = torch.from_numpy(bits.astype(np.bool_)).to(row.device)
        row.masked_fill_(~allowed, -math.inf)


def _ids(tokens: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64)).to(device)


# Drawing.


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), the same for the same seed and position on every machine."""
    return (_mix(_mix(seed & _MASK64) + position) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
    return state ^ (state >> 31)


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> torch.Tensor:
    """Tokens [R] drawn from logits [R, V] at the uniform `numbers`, row by row the same alone."""
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], device=device)
    probabilities = torch.softmax(logits / temperature[:, None], -1)
    chosen = torch.empty(len(params), dtype=torch.int64, device=device)
    plain = [row for row, p in enumerate(params) if not _is_truncated(p, logits.shape[1])]
    if plain:
        rows = torch.tensor(plain, device=device)
        chosen[rows] = _invert(probabilities[rows], [numbers[row] for row in plain])
    for row in sorted(set(range(len(params))) - set(plain)):
        candidates, tokens = truncate(probabilities[row], params[row])
        chosen[row] = tokens[_invert(candidates[None], [numbers[row]])[0]]
    return chosen


def _is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size or params.min_p > 0.0


def truncate(
    probabilities: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidates left by min_p, top_k and top_p: (probabilities, token ids), likeliest first.

    probabilities: [V]. top_p keeps the fewest candidates whose mass, among those that top_k and
    min_p left, reaches it.
    """
    vocab_size = probabilities.shape[0]
    limit = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    wanted = min(limit, _NUCLEUS)
    floor = params.min_p * probabilities.max()
    total = probabilities.sum() if limit == vocab_size else None
    while True:
        best, tokens = torch.topk(probabilities, wanted)
        mass = best.double().cumsum(0)
        kept = int((best >= floor).sum())
        enough = wanted == limit or kept < wanted
        if not enough and params.top_p < 1.0 and params.min_p == 0.0 and total is not None:
            enough = bool(mass[-1] >= params.top_p * total)
        if enough:
            break
        wanted = limit
    best, tokens, mass = best[:kept], tokens[:kept], mass[:kept]
    if params.top_p < 1.0:
        whole = total if kept == wanted < limit and total is not None else mass[-1]
        kept = int((mass < params.top_p * whole).sum()) + 1
    return best[:kept], tokens[:kept]


def _invert(weights: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """Per row, the index at which the cumulative weight first exceeds number * total."""
    mass = weights.double().cumsum(-1)
    targets = torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None]
    found = torch.searchsorted(mass, targets * mass[:, -1:], right=True)[:, 0]
    return found.clamp_max(weights.shape[1] - 1)


def target_logprobs(
    logits: torch.Tensor, targets: Sequence[int], wanted: Sequence[int]
) -> list[TokenLogprob]:
    """Row by row the target's log-probability and rank, and the `wanted` most likely tokens'.

    logits: [R, vocabulary], float32.
    """
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs.gather(1, torch.tensor(targets, device=logits.device)[:, None])
    ranks = ((logprobs > chosen).sum(1) + 1).tolist()
    values, tokens = (part.tolist() for part in torch.topk(logprobs, max(wanted)))
    told = []
    for row, (target, count) in enumerate(zip(targets, wanted, strict=True)):
        top = tuple(zip(tokens[row][:count], values[row][:count], strict=True))
        told.append(TokenLogprob(target, float(chosen[row, 0]), top, ranks[row]))
    return told


def _logprob(logits: torch.Tensor, token: int, wanted: int | None) -> TokenLogprob | None:
    """Log-probabilities under the model itself, before bias, penalties and temperature."""
    if wanted is None:
        return None
    logprobs = torch.log_softmax(logits, -1)
    values, tokens = torch.topk(logprobs, wanted)
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
