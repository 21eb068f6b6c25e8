"""Divides token ids into messages, by the marks that a chat template writes before each role.

It tells roles and sizes but no text, so that a prefix can be described where prompts are not kept.
The marks are learned from the template once. A model whose template writes no special token before
a message has no outline, because a user could write the same words.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import RequestError

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer  # transformers

WORDS = ("alpha", "bravo", "charlie", "delta")  # contents that no template contains
SAMPLES = (
    ("user", "assistant", "user"),
    ("system", "user", "assistant"),
    ("user", "assistant", "tool", "assistant"),
)


class Outline:
    """Finds the messages in one model's prompts. Immutable once it has learned. Any thread."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    def __call__(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """The role and the number of tokens of each message, including its marks. The role "" is
        for tokens before the first mark."""
        found: list[tuple[str, int]] = []
        role, begin = "", 0
        first = np.isin(np.asarray(tokens, np.int64), list(self._marks))
        for place in np.flatnonzero(first).tolist():
            for mark, name in self._marks[tokens[place]]:
                if tuple(tokens[place : place + len(mark)]) == mark:
                    if place > begin:
                        found.append((role, place - begin))
                    role, begin = name, place
                    break
        if len(tokens) > begin:
            found.append((role, len(tokens) - begin))
        return found

    @cached_property
    def _marks(self) -> dict[int, list[tuple[tuple[int, ...], str]]]:
        """Marks and their roles by first token, longest first."""
        gaps: dict[str, list[tuple[int, ...]]] = {}
        for roles in SAMPLES if self._tokenizer.has_chat_template else ():
            for role, gap in self._gaps(roles):
                gaps.setdefault(role, []).append(gap)
        marks: dict[int, list[tuple[tuple[int, ...], str]]] = {}
        for role, candidates in gaps.items():
            others = [gap for name, each in gaps.items() if name != role for gap in each]
            found = filter(None, (self._mark(gap, others) for gap in candidates))
            if mark := min(found, key=len, default=()):
                marks.setdefault(mark[0], []).append((mark, role))
        for each in marks.values():
            each.sort(key=lambda one: -len(one[0]))
        return marks

    def _gaps(self, roles: Sequence[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The tokens that the template writes before each message. Trailing white space is left
        out, since it may merge with the text after it."""
        messages: list[dict[str, Any]] = [
            {"role": role, "content": word} for role, word in zip(roles, WORDS, strict=False)
        ]
        try:
            text = self._tokenizer.render(messages, add_generation_prompt=False)
        except RequestError:  # the template lacks this role or order
            return
        begin = 0
        for role, word in zip(roles, WORDS, strict=False):
            at = text.find(word, begin)
            if at < 0:
                return
            gap = text[begin:at].rstrip()
            yield role, tuple(self._tokenizer.encode(gap, add_special_tokens=False))
            begin = at + len(word)

    def _mark(self, gap: tuple[int, ...], others: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shortest end of `gap` that begins with a special token and is not an end of another
        role's."""
        special = self._tokenizer.special_token_ids
        for start in range(len(gap) - 1, -1, -1):
            mark = gap[start:]
            if gap[start] in special and all(other[-len(mark) :] != mark for other in others):
                return mark
        return ()
