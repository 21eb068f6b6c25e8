"""The prompts of a run: trunks that end at block borders or beside them, and what follows them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from cachesvc.conform.question import Question

_FIRST_ID, _LAST_ID = 100, 4000  # ordinary tokens in the vocabularies of today's models
_WORDS = [
    "the",
    "river",
    "old",
    "stone",
    "light",
    "carried",
    "number",
    "seven",
    "house",
    "winter",
    "garden",
    "letter",
    "north",
    "answer",
    "paper",
    "music",
    "window",
    "story",
    "market",
    "bridge",
    "silver",
    "morning",
]
_EXTRA = 9  # tokens of a short continuation


@dataclass(frozen=True, slots=True)
class Round:
    """The questions of one trunk: itself first, then continuations of it."""

    questions: tuple[Question, ...]

    @property
    def longest(self) -> Question:
        return max(self.questions, key=lambda each: len(each.prompt))


def rounds(
    *, block: int, max_tokens: int, seed: int, longest: int, as_text: bool
) -> Iterator[Round]:
    """Rounds without end. Every trunk begins differently."""
    draw = random.Random(seed)
    while True:
        for length in _lengths(block, longest):
            trunk = _drawn(draw, length)
            short, long = _drawn(draw, _EXTRA), _drawn(draw, block + 1)
            prompts = [trunk, trunk + short[:1], trunk + short, trunk + long]
            made = [Question(_prompt(each, as_text), max_tokens) for each in prompts]
            sampled = Question(made[2].prompt, max_tokens, seed=draw.randrange(1 << 31))
            yield Round((*made, sampled))


def _lengths(block: int, longest: int) -> list[int]:
    """Each number of blocks up to the longest, with one token less and one more; the longest trunk
    comes early, so that a short run has it too."""
    counts = sorted({1, 2, 3, 5, 8, 16}, key=lambda n: (n not in (1, 8), n))
    lengths = [n * block + off for n in counts for off in (0, -1, 1)]
    return [length for length in lengths if 1 < length <= longest]


def _drawn(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(_FIRST_ID, _LAST_ID) for _ in range(length))


def _prompt(ids: tuple[int, ...], as_text: bool) -> tuple[int, ...] | str:
    if not as_text:
        return ids
    return " ".join(_WORDS[each % len(_WORDS)] + str(each % 7) for each in ids)
