"""A sequence's position in its grammar; see `engine.structure.GrammarState`.

If the grammar allows only one text, its tokens are those of the tokenizer; the model does not
choose the spelling. So the answer is the same whether forced tokens are computed one by one or all
at once (the "jump-forward" of SGLang's compressed state machine, arXiv 2312.07104, section 4).
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]  # [num_words], one bit per token

# The CPU time that matching one answer may take. An ambiguous hostile grammar makes matching slow:
# `root ::= root root root | "a"` took 0.13 s a token after 280 tokens.
MATCH_SLACK_S = 1.0
MATCH_S_PER_TOKEN = 0.005
QUICK_S = 0.002  # a state that once took longer is matched on another thread from then on
MAX_FORCED = 256  # tokens found at a time


class Vocabulary:
    """The ids that end an answer, and masks of ids."""

    def __init__(self, num_tokens: int, end: Sequence[int]) -> None:
        self.end = tuple(end)
        self.num_words = -(-num_tokens // 32)
        self.end_mask = self.mask_of(end)

    def mask_of(self, ids: Sequence[int]) -> Mask:
        bits = np.zeros(self.num_words * 32, dtype=np.bool_)
        bits[list(ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass(frozen=True, slots=True)
class Look:
    """The next tokens: those allowed, those forced, or why there are none."""

    mask: Mask
    forced: tuple[int, ...] = ()
    stuck: str | None = None
    cpu_s: float = 0.0


def look(matcher: Any, tokens: Sequence[int], vocabulary: Vocabulary) -> Look:
    """Advance a matcher by tokens, each of which was allowed, and find the next ones."""
    begun_s = time.thread_time()
    matcher.consume_tokens(list(tokens))
    # Computed first, since it alone leaves the interpreter lock to others.
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[: vocabulary.num_words].copy()
    forced: tuple[int, ...] = ()
    stuck = None
    further = mask & ~vocabulary.end_mask
    if matcher.is_error() and "NoExtension" not in matcher.get_error():
        stuck = f"the grammar is too ambiguous: {' '.join(matcher.get_error().split())[:200]}"
    elif not further.any():
        if matcher.is_accepting():
            forced = vocabulary.end[:1]
        else:
            stuck = "no token of the model can follow under this grammar"
    elif not (mask & vocabulary.end_mask).any() and np.bitwise_count(mask).sum() == 1:
        forced = tuple(matcher.compute_ff_tokens()[:MAX_FORCED]) or (_only(mask),)
    return Look(mask, forced, stuck, time.thread_time() - begun_s)


def _only(mask: Mask) -> int:
    return int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])


class MatcherState:
    """One sequence's state. Engine thread only.

    Invariant: while a look is under way, its thread alone uses the matcher.
    """

    def __init__(
        self,
        matcher: Any,
        first: Look,
        vocabulary: Vocabulary,
        threads: ThreadPoolExecutor,
        min_tokens: int,
    ) -> None:
        self.forced: deque[int] = deque()
        self.stuck: str | None = None
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._threads = threads
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._spent_s = 0.0
        self._quick = True
        self._untold: list[int] = []  # forced tokens that the matcher has not seen yet
        self._under_way: Future[Look] | None = None
        self._take(first)

    @property
    def ready(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        if self._under_way is not None:
            wait_for([self._under_way], timeout_s)
            if not self._under_way.done():
                return False
            done, self._under_way = self._under_way, None
            self._take(done.result())
        return True

    @property
    def allowed(self) -> Mask:
        assert self._under_way is None
        return self._vocabulary.mask_of([self.forced[0]]) if self.forced else self._mask

    def accept(self, token: int) -> None:
        self._num_tokens += 1
        if token in self._vocabulary.end:
            self.forced.clear()
            return
        expected = self.forced.popleft() if self.forced else token
        assert token == expected, (token, expected)
        self._untold.append(token)
        if self.forced:
            return
        untold, self._untold = self._untold, []
        if self._quick:
            self._take(look(self._matcher, untold, self._vocabulary))
        else:
            self._under_way = self._threads.submit(look, self._matcher, untold, self._vocabulary)

    def _take(self, found: Look) -> None:
        self._quick &= found.cpu_s < QUICK_S
        self._spent_s += found.cpu_s
        self._mask, self.stuck = found.mask.copy(), found.stuck
        self.forced.extend(found.forced)
        if self._spent_s > MATCH_SLACK_S + MATCH_S_PER_TOKEN * self._num_tokens:
            self.stuck = (
                f"the grammar is too ambiguous: matching {self._num_tokens} tokens took "
                f"{self._spent_s:.1f} s"
            )
        elif not self.forced and self._num_tokens < self._min_tokens:
            self._mask &= ~self._vocabulary.end_mask
