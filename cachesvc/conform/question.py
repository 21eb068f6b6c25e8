"""A question, its answer, and where two answers to it part. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as token ids or as text, and how to sample. `seed` None is greedy."""

    prompt: tuple[int, ...] | str
    max_tokens: int
    seed: int | None = None

    def body(self, model: str) -> dict[str, Any]:
        """The body of `POST /v1/completions`."""
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

    def as_json(self) -> dict[str, Any]:
        prompt = self.question.prompt
        return {
            "kind": self.kind,
            "prompt_length": len(prompt),
            "sampling": "greedy" if self.question.seed is None else f"seed {self.question.seed}",
            "at": self.at,
            "expected": _shown(self.expected.tokens, self.at),
            "given": _shown(self.given.tokens, self.at),
            "moved": self.moved,
            "cached": self.given.cached,
            "tiers": dict(self.given.tiers),
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
        }


def compare(kind: str, question: Question, expected: ServedAnswer, given: ServedAnswer) -> Check:
    """Compare two answers to one question."""
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


def _shown(tokens: Sequence[str], at: int | None) -> str | None:
    return tokens[at] if at is not None and at < len(tokens) else None
