"""Chooses tokens from logits, after what requests change in them (`execution.adjusting`).

Engine thread only. A token depends only on its row of logits, its span and its seed, never on the
rest of the batch. Randomness is one uniform number per token, hashed from (seed, position). The
choice is the inverse of the row's cumulative distribution at that number. If no token can be chosen
from a row, only that row's sequence fails.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.batch import Sampled, Span
from engine.execution.adjusting import Adjusting
from engine.execution.drawing import draw, mix, uniform
from engine.hardware import upload
from engine.request import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5  # temperatures below this are greedy
NOT_A_NUMBER = "the model's logits are not numbers (NaN) for this prompt"
NOTHING_LEFT = "no token is left to choose: every one is forbidden or has probability 0"
_FAULTS = {-1: NOT_A_NUMBER, -2: NOTHING_LEFT}


class Sampler:
    """Chooses tokens. Between steps it keeps the entropy for requests without a seed, and what the
    penalties of a sequence count until `forget`."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._adjusting = Adjusting(eos_token_ids)
        self._entropy = secrets.randbits(64)

    def sample(self, logits: torch.Tensor, spans: Sequence[Span]) -> list[Sampled]:
        """Choose one token per span. logits: [len(spans), vocabulary], float32; not changed."""
        adjusted = self._adjusting(logits, spans)
        chosen = adjusted.argmax(-1)
        peaks = adjusted.gather(1, chosen[:, None])[:, 0]  # NaN if the row has one
        drawn = [row for row, span in enumerate(spans) if not is_greedy(span.params)]
        if drawn:
            rows = upload(np.array(drawn), logits.device)
            chosen[rows] = draw(
                adjusted[rows],
                [spans[row].params for row in drawn],
                [self._uniform(spans[row]) for row in drawn],
            )
        chosen[peaks.isnan()] = -1
        chosen[peaks == -math.inf] = -2
        tokens: list[int] = chosen.tolist()
        logprobs = _logprobs(logits, spans, tokens)
        return [
            Sampled(span.sequence_id, None, error=_FAULTS[token], suspect=token == -1)
            if token < 0
            else Sampled(span.sequence_id, token, logprobs.get(row))
            for row, (span, token) in enumerate(zip(spans, tokens, strict=True))
        ]

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended, or is computed anew."""
        self._adjusting.forget(sequence_id)

    def _uniform(self, span: Span) -> float:
        seed = span.params.seed
        if seed is None:
            return uniform(self._entropy ^ mix(span.sequence_id), span.sampled_before)
        return uniform(seed, span.sampled_before)


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def target_logprobs(
    logits: torch.Tensor, targets: Sequence[int], wanted: Sequence[int]
) -> list[TokenLogprob]:
    """For each row, the log-probability and rank of the target, and the `wanted` most likely
    tokens.

    logits: [R, vocabulary], float32.
    """
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs.gather(1, upload(np.array(targets, np.int64), logits.device)[:, None])
    ranks = ((logprobs > chosen).sum(1) + 1).tolist()
    values, tokens = (part.tolist() for part in torch.topk(logprobs, max(wanted)))
    own = chosen[:, 0].tolist()
    found = []
    for row, (target, count) in enumerate(zip(targets, wanted, strict=True)):
        top = tuple(zip(tokens[row][:count], values[row][:count], strict=True))
        found.append(TokenLogprob(target, own[row], top, ranks[row]))
    return found


def _logprobs(
    logits: torch.Tensor, spans: Sequence[Span], tokens: Sequence[int]
) -> dict[int, TokenLogprob]:
    """Log-probabilities by row, for spans that request them and have a token. They are the model's
    own, before bias, penalties and temperature."""
    rows = [r for r, s in enumerate(spans) if s.params.logprobs is not None and tokens[r] >= 0]
    if not rows:
        return {}
    logprobs = target_logprobs(
        logits[upload(np.array(rows), logits.device)],
        [tokens[row] for row in rows],
        [spans[row].params.logprobs or 0 for row in rows],
    )
    return {row: replace(one, rank=0) for row, one in zip(rows, logprobs, strict=True)}
