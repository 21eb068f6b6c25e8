"""Computes in parts what does not fit into the device's memory at once. Engine thread only.

A step's memory grows with its tokens, and by some paths with the prefix that they read. How much is
free depends on the allocator's history. So a step that runs out of memory is halved: first by
sequences, then at the border of a block, as the scheduler's own chunks are. Only a sequence that
cannot compute one block fails. What has been computed is not computed again: if the memory ends
while tokens are chosen, only the choice is halved.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.batch import Sampled, Span

logger = logging.getLogger(__name__)

NO_MEMORY = "the device has too little free memory to compute this request"
CALM_STEPS = 64  # steps that fit, after which twice as many tokens are tried again

Compute = Callable[[Sequence[Span]], list[Sampled]]
Choose = Callable[[torch.Tensor, Sequence[Span]], list[Sampled]]


def choose_in_parts(choose: Choose, logits: torch.Tensor, spans: Sequence[Span]) -> list[Sampled]:
    """`choose` for as many rows at once as fit. logits: [len(spans), vocabulary]. The step is not
    computed again."""
    try:
        return choose(logits, spans)
    except torch.OutOfMemoryError as error:
        logger.warning(f"a choice of {len(spans)} tokens does not fit, so it is halved: {error}")
    _give_back()
    if len(spans) == 1:
        return [Sampled(spans[0].sequence_id, None, error=NO_MEMORY)]
    half = len(spans) // 2
    first = choose_in_parts(choose, logits[:half], spans[:half])
    return first + choose_in_parts(choose, logits[half:], spans[half:])


class Shrinking:
    """Steps of any size. `max_tokens` is the most that are tried at once after a step did not fit,
    or None."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.max_tokens: int | None = None
        self._num_calm = 0

    def __call__(self, compute: Compute, spans: Sequence[Span]) -> list[Sampled]:
        """One `Sampled` for each span, in order. `compute` is not kept: its owner keeps this."""
        if self.max_tokens is None or _num_tokens(spans) <= self.max_tokens:
            done = self._try(compute, spans)
            if done is not None:
                self._calm(spans)
                return done
        return self._in_halves(compute, spans)

    def _try(self, compute: Compute, spans: Sequence[Span]) -> list[Sampled] | None:
        """The results, or None if the memory is too small for them."""
        num_tokens = _num_tokens(spans)
        try:
            return compute(spans)
        except torch.OutOfMemoryError as error:
            most = max(self._block_size, num_tokens // 2)
            self.max_tokens = min(most, self.max_tokens or most)
            self._num_calm = 0
            logger.warning(f"a step of {num_tokens} tokens does not fit, so it is halved: {error}")
        _give_back()
        return None

    def _in_halves(self, compute: Compute, spans: Sequence[Span]) -> list[Sampled]:
        if len(spans) > 1:
            half = len(spans) // 2
            return self(compute, spans[:half]) + self(compute, spans[half:])
        [span] = spans
        border = self._border(span)
        if border is None:
            done = self._try(compute, spans)
            return [Sampled(span.sequence_id, None, error=NO_MEMORY)] if done is None else done
        [first] = self(compute, [_head(span, border)])
        if first.error is not None:
            return [first]
        [second] = self(compute, [_tail(span, border)])
        return [second._replace(targets=first.targets + second.targets)]

    def _border(self, span: Span) -> int | None:
        """The offset in the span of the block border nearest its middle; None if it has none."""
        size, end = self._block_size, span.start + len(span.tokens)
        lowest, highest = span.start // size + 1, (end - 1) // size
        if lowest > highest or not span.write_kv:
            return None
        middle = round((span.start + end) / 2 / size)
        return min(max(middle, lowest), highest) * size - span.start

    def _calm(self, spans: Sequence[Span]) -> None:
        """Count a step that was about as large as is tried."""
        if self.max_tokens is None or 2 * _num_tokens(spans) < self.max_tokens:
            return
        self._num_calm += 1
        if self._num_calm >= CALM_STEPS:
            self.max_tokens, self._num_calm = 2 * self.max_tokens, 0


def _give_back() -> None:
    """Give free memory back. Outside the handler, whose error keeps the failed step's tensors."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _num_tokens(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


def _head(span: Span, count: int) -> Span:
    """The span's first `count` tokens, after which nothing is chosen."""
    return replace(
        span,
        tokens=span.tokens[:count],
        sample=False,
        history=None,
        allowed=None,
        targets=None if span.targets is None else span.targets[:count],
    )


def _tail(span: Span, count: int) -> Span:
    """The span without its first `count` tokens."""
    targets = None if span.targets is None else span.targets[count:]
    return replace(
        span,
        tokens=span.tokens[count:],
        start=span.start + count,
        targets=None if targets is None or not len(targets) else targets,
    )
