"""Questions, their answers, and where two answers to one part. Pure.

Prompts are trunks that end at block borders or beside them, and what follows them.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

_FIRST_ID, _LAST_ID = 100, 4000  # ordinary tokens in the vocabularies of today's models
_WORDS = "river old stone light number seven winter letter music silver".split()  # noqa: SIM905
_EXTRA = 9  # tokens of a short continuation


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as token ids or as text, and how to sample. `seed` None is greedy."""

    prompt: tuple[int, ...] | str
    max_tokens: int
    seed: int | None = None

    def body(self, model: str) -> dict[str, Any]:
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        body = {"model": model, "prompt": prompt, "max_tokens": self.max_tokens, "logprobs": 1}
        if self.seed is None:
            return body | {"temperature": 0}
        return body | {"temperature": 0.9, "top_p": 0.95, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """`tokens` as the server shows them; one text if it shows no tokens. `tiers` is how many prompt
    tokens each tier served, if the server says."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...] = ()
    cached: int | None = None
    tiers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. `at` is the first token that differs; None: the answers are equal. `moved` is
    the largest change of a log-probability before that; None: the server serves none."""

    kind: str
    question: Question
    expected: ServedAnswer
    given: ServedAnswer
    at: int | None
    moved: float | None


def compare(kind: str, question: Question, expected: ServedAnswer, given: ServedAnswer) -> Check:
    pairs = enumerate(zip_longest(expected.tokens, given.tokens))
    at = next((number for number, (one, other) in pairs if one != other), None)
    both = list(zip(expected.logprobs, given.logprobs, strict=False))[:at]
    moved = max((abs(a - b) for a, b in both), default=0.0)
    served = bool(expected.logprobs and given.logprobs)
    return Check(kind, question, expected, given, at, moved if served else None)


def read_answer(body: Mapping[str, Any]) -> ServedAnswer:
    """The answer in the body of a completion, as our server, vLLM, SGLang or llama-server write it.

    Raises ValueError if it has no choice.
    """
    choices = body.get("choices") or []
    if not choices:
        raise ValueError(f"the answer has no choices: {str(body)[:200]}")
    shown = choices[0].get("logprobs") or {}
    if shown.get("content"):  # as in chats; so llama-server answers
        tokens = [str(each["token"]) for each in shown["content"]]
        logprobs = [float(each["logprob"]) for each in shown["content"]]
    else:
        tokens = [str(each) for each in shown.get("tokens") or [choices[0].get("text", "")]]
        logprobs = [float(each) for each in shown.get("token_logprobs") or ()]
    details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
    return ServedAnswer(
        tuple(tokens),
        tuple(logprobs),
        details.get("cached_tokens"),
        details.get("cached_tokens_details") or {},
    )


def rounds(
    *, block: int, max_tokens: int, seed: int, longest: int, as_text: bool
) -> Iterator[tuple[Question, ...]]:
    """Rounds without end: the questions of a trunk, itself first, then continuations of it. Every
    trunk begins differently."""
    draw = random.Random(seed)
    while True:
        for length in _lengths(block, longest):
            trunk = _drawn(draw, length)
            short, long = _drawn(draw, _EXTRA), _drawn(draw, block + 1)
            prompts = [trunk, trunk + short[:1], trunk + short, trunk + long]
            made = [Question(_prompt(each, as_text), max_tokens) for each in prompts]
            yield *made, Question(made[2].prompt, max_tokens, seed=draw.randrange(1 << 31))


def _lengths(block: int, longest: int) -> list[int]:
    """Each number of blocks up to the longest, with one token less and one more; the longest trunk
    comes early, so that a short run has it too."""
    lengths = [n * block + off for n in (1, 8, 2, 3, 5, 16) for off in (0, -1, 1)]
    return [length for length in lengths if 1 < length <= longest]


def _drawn(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(_FIRST_ID, _LAST_ID) for _ in range(length))


def _prompt(ids: tuple[int, ...], as_text: bool) -> tuple[int, ...] | str:
    return " ".join(_WORDS[each % 10] + str(each // 10 % 10) for each in ids) if as_text else ids
