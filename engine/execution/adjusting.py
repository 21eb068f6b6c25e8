"""What a request changes in its logits: penalties, biases, and tokens that it may not choose.

All rows of a step are changed by a few operations on the device, however many they are. What a
penalty counts is kept by sequence on the host: a step adds one token to it. Counts on the device
would be as wide as the vocabulary, of which a sequence has seen a hundredth.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Span
from engine.hardware import upload
from engine.request import SamplingParams


def has_penalty(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


class SeenTokens:
    """The distinct tokens of one sequence in order, and how often it has generated each."""

    def __init__(self) -> None:
        self.tokens: NDArray[np.int64] = np.zeros(0, np.int64)
        self.counts: NDArray[np.float32] = np.zeros(0, np.float32)
        self._num_prompt = self._length = 0
        self._last: int | None = None

    def follow(self, history: NDArray[np.int32], num_prompt_tokens: int) -> None:
        """Take in what came since the last call; history: [prompt + generated]."""
        known = self._length and (num_prompt_tokens, self._last) == (
            self._num_prompt,
            int(history[self._length - 1]) if len(history) >= self._length else None,
        )
        if not known:
            self.tokens = np.unique(history[:num_prompt_tokens]).astype(np.int64)
            self.counts = np.zeros(len(self.tokens), np.float32)
            self._length = self._num_prompt = num_prompt_tokens
        fresh, times = np.unique(history[self._length :], return_counts=True)
        if len(fresh):
            at = np.searchsorted(self.tokens, fresh)
            missing = np.append(self.tokens, -1)[at] != fresh
            self.counts = np.insert(self.counts, at[missing], 0)
            self.tokens = np.insert(self.tokens, at[missing], fresh[missing])
            self.counts[np.searchsorted(self.tokens, fresh)] += times
        self._length = len(history)
        self._last = int(history[-1]) if len(history) else None


class _Entries(NamedTuple):
    """Some tokens of one row, with two numbers for each."""

    row: int
    tokens: NDArray[np.int64]
    first: NDArray[np.float32]
    second: NDArray[np.float32]


class Adjusting:
    """Engine thread only. `forget` a sequence when it ends."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._seen: dict[int, SeenTokens] = {}

    def __call__(self, logits: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """The logits [len(spans), vocabulary] after penalties, biases and masks, in this order. The
        same tensor if no span needs any."""
        penalised = [self._penalties(row, span) for row, span in enumerate(spans)]
        entries = [each for each in penalised if each is not None and len(each.tokens)]
        biased = [_biases(row, s.params) for row, s in enumerate(spans) if s.params.logit_bias]
        masked = [(row, s.allowed) for row, s in enumerate(spans) if s.allowed is not None]
        barred = [(row, ids) for row, s in enumerate(spans) if (ids := self._forbidden(s))]
        if not (entries or biased or masked or barred):
            return logits
        adjusted = logits.clone()
        if entries:
            _penalise(adjusted, entries)
        if biased:
            at, biases, _ = _uploaded(biased, logits.device)
            adjusted[at] += biases
        if masked:
            words = np.stack([allowed for _, allowed in masked]).view(np.int32)
            _forbid(adjusted, [row for row, _ in masked], words)
        if barred:
            rows = np.repeat([row for row, _ in barred], [len(ids) for _, ids in barred])
            tokens = np.concatenate([ids for _, ids in barred])
            adjusted[tuple(upload(np.stack([rows, tokens]), logits.device))] = -math.inf
        return adjusted

    def forget(self, sequence_id: int) -> None:
        self._seen.pop(sequence_id, None)

    def _penalties(self, row: int, span: Span) -> _Entries | None:
        """What each token seen is divided or multiplied by, and what is subtracted from it.

        Presence and frequency count only generated tokens (OpenAI). Repetition divides positive and
        multiplies negative logits of every token seen, including the prompt's (Keskar et al. 2019,
        CTRL, 4.1).
        """
        params = span.params
        if span.history is None or not has_penalty(params):
            return None
        seen = self._seen.setdefault(span.sequence_id, SeenTokens())
        seen.follow(span.history, span.num_prompt_tokens)
        tokens, counts = seen.tokens, seen.counts
        if params.repetition_penalty == 1.0:
            tokens, counts = tokens[counts > 0], counts[counts > 0]
        less = np.where(
            counts > 0,
            np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts,
            np.float32(0),
        )
        penalty = np.full(len(tokens), params.repetition_penalty, np.float32)
        return _Entries(row, tokens, penalty, less)

    def _forbidden(self, span: Span) -> list[int]:
        """Ids that would end the sequence before `min_tokens`. With a grammar, its mask handles
        this."""
        if span.sampled_before >= span.params.min_tokens or span.allowed is not None:
            return []
        return [*self._eos_token_ids, *span.params.stop_token_ids]


def _forbid(adjusted: torch.Tensor, rows: Sequence[int], words: NDArray[np.int32]) -> None:
    """Minus infinity where a mask has no bit. words: [N, W], of the N rows: bit i of word w is for
    token 32 w + i. They are uploaded as they are, 19 kB a row of 150k tokens."""
    device = adjusted.device
    bits = torch.ones((), dtype=torch.int32, device=device) << torch.arange(
        32, dtype=torch.int32, device=device
    )
    absent = (upload(words, device)[:, :, None] & bits) == 0
    at = upload(np.array(rows), device)
    adjusted[at] = adjusted[at].masked_fill(absent.flatten(1)[:, : adjusted.shape[1]], -math.inf)


def _penalise(adjusted: torch.Tensor, entries: Sequence[_Entries]) -> None:
    at, penalty, less = _uploaded(entries, adjusted.device)
    scores = adjusted[at]
    adjusted[at] = torch.where(scores > 0, scores / penalty, scores * penalty) - less


def _biases(row: int, params: SamplingParams) -> _Entries:
    assert params.logit_bias is not None
    tokens = np.fromiter(params.logit_bias.keys(), np.int64)
    biases = np.fromiter(params.logit_bias.values(), np.float32)
    return _Entries(row, tokens, biases, biases)


def _uploaded(
    entries: Sequence[_Entries], device: torch.device
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """The places (rows, tokens) of all entries, and their numbers, in two copies."""
    rows = np.repeat([each.row for each in entries], [len(each.tokens) for each in entries])
    tokens = np.concatenate([each.tokens for each in entries])
    first = np.concatenate([each.first for each in entries])
    second = np.concatenate([each.second for each in entries])
    numbers = upload(np.stack([first, second]), device)
    return tuple(upload(np.stack([rows, tokens]), device)), numbers[0], numbers[1]
