"""A sequence's position in its grammar; see `engine.structure.GrammarState`.

If the grammar allows only one text, its tokens are those of the tokenizer; the model does not
choose the spelling. So the answer is the same whether forced tokens are computed one by one or all
at once (the "jump-forward" of SGLang's compressed state machine, arXiv 2312.07104, section 4).
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from engine.grammar.matcher import Look
from engine.grammar.vocabulary import Mask, Vocabulary

# The CPU time that matching one answer may take. An ambiguous hostile grammar makes matching slow
# without bound: `root ::= root root root | "a"` took 0.13 s a token after 1,000 tokens.
MATCH_SLACK_S = 1.0
MATCH_S_PER_TOKEN = 0.005


class Link(Protocol):
    """The connection to the process that matches a state's grammar."""

    def ask(self, state: "MatcherState", tokens: Sequence[int]) -> None:
        """Request the look after these further tokens. `state.received` gets it later."""
        ...

    def wait(self, state: "MatcherState", timeout_s: float) -> None:
        """Process answers that have arrived, and wait up to `timeout_s` for the one of `state`."""
        ...


class MatcherState:
    """One sequence's state. Engine thread only.

    Invariant: while it is `ready`, all but the `forced` tokens' followers are known.
    """

    def __init__(
        self, vocabulary: Vocabulary, link: Link, first: Look, *, number: int, min_tokens: int
    ) -> None:
        self.number = number  # among the states of one link
        self.forced: deque[int] = deque()
        self.stuck: str | None = None
        self._vocabulary = vocabulary
        self._link = link
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._spent_s = 0.0
        self._untold: list[int] = []  # tokens not sent to the link yet
        self._asked = False
        self._take(first)

    @property
    def ready(self) -> bool:
        if self._asked:
            self._link.wait(self, 0.0)
        return not self._asked

    def wait(self, timeout_s: float) -> bool:
        if self._asked:
            self._link.wait(self, timeout_s)
        return not self._asked

    @property
    def allowed(self) -> Mask:
        assert not self._asked
        return self._vocabulary.mask_of([self.forced[0]]) if self.forced else self._mask

    def accept(self, token: int) -> None:
        self._num_tokens += 1
        if token in self._vocabulary.end:
            self.forced.clear()
            return
        expected = self.forced.popleft() if self.forced else token
        assert token == expected, (token, expected)
        self._untold.append(token)
        if not self.forced:
            untold, self._untold = self._untold, []
            self._asked = True
            self._link.ask(self, untold)

    def received(self, look: Look | None) -> None:
        """Receive the requested look. None if the link has failed."""
        self._asked = False
        if look is None:
            self.stuck = "the grammar is too ambiguous: looking at the next token took too long"
            return
        self._spent_s += look.cpu_s
        if self._spent_s > MATCH_SLACK_S + MATCH_S_PER_TOKEN * self._num_tokens:
            self.stuck = (
                f"the grammar is too ambiguous: matching {self._num_tokens} tokens took "
                f"{self._spent_s:.1f} s"
            )
            return
        self._take(look)

    def _take(self, look: Look) -> None:
        """Find the forced tokens, or else the allowed ones."""
        vocabulary = self._vocabulary
        self._mask = mask = look.mask.copy()
        may_end = (mask & vocabulary.end_mask).any()
        goes_on = (mask & ~vocabulary.end_mask).any()
        if may_end and goes_on:
            if self._num_tokens < self._min_tokens:
                mask &= ~vocabulary.end_mask
            return
        if not goes_on:
            if may_end:
                self.forced.append(vocabulary.end[0])
            else:
                self.stuck = "no token of the model can follow under this grammar"
            return
        self.forced += self._spelt(look)
        if not self.forced and (only := vocabulary.only_token(mask)) is not None:
            self.forced.append(only)

    def _spelt(self, look: Look) -> list[int]:
        """The tokenizer's tokens for the forced text, up to the point where a token longer than the
        rest is allowed. From there the model chooses."""
        tokens = list(self._vocabulary.encode(look.text.decode())) if look.text else []
        pieces = [self._vocabulary.tokens[token] for token in tokens]
        if b"".join(pieces) != look.text:
            return []  # this tokenizer adds something before a text
        kept: list[int] = []
        offset = 0
        for token, piece in zip(tokens, pieces, strict=True):
            if not piece or look.crosses[offset]:
                break
            kept.append(token)
            offset += len(piece)
        return kept
