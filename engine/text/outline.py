"""Which messages token ids are of, by the marks that a chat template writes before each role.

Tells roles and sizes and no word of a message, so that a prefix can be named where prompts are not
kept. The marks are learned from the template once. A model whose template writes no special token
before a message has no outline: a user could write the same words.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer

WORDS = ("alpha", "bravo", "charlie", "delta")  # contents that no template writes
SAMPLES = (
    ("user", "assistant", "user"),
    ("system", "user", "assistant"),
    ("user", "assistant", "tool", "assistant"),
)


class Outline:
    """The messages of one model's prompts. Immutable once it has learned; any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Role and number of tokens of each message, its marks included; a role of "" is of what
        comes before the first mark."""
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
        """Marks and their roles by the token that they begin with, the longest first."""
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
        """What the template writes before each message, as tokens without the white space at its
        end, which may join with what follows."""
        messages: list[dict[str, Any]] = [
            {"role": role, "content": word} for role, word in zip(roles, WORDS, strict=False)
        ]
        try:
            text = self._tokenizer.render(messages, add_generation_prompt=False)
        except RequestError:  # a template without this role or order
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
        """The shortest end of `gap` that begins with a special token and ends no other role's."""
        special = self._tokenizer.special_token_ids
        for start in range(len(gap) - 1, -1, -1):
            mark = gap[start:]
            if gap[start] in special and all(other[-len(mark) :] != mark for other in others):
                return mark
        return ()
