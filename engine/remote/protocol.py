"""What is asked of an engine at a URL for one sequence, and what its answer says. Pure values.

`vllm` and `sglang` implement `Protocol` for the engines that there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard
from typing import Protocol as TypingProtocol

from engine.request import FinishReason, Request, TokenLogprob
from engine.scheduling.group import seed_of
from tiers.tier import TierName

TIERS = "tiers"  # of the cached tokens in a usage, for an engine that tells them apart
_MAX_SEED = (1 << 63) - 1  # seeds are signed there; -1 means no seed
_FINISHES: Mapping[str, FinishReason] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceAsk:
    """One sequence of a request. `room` is how many tokens fit the context after the prompt, `end`
    the model's end-of-answer ids. `salt` separates what must not share a prefix."""

    request: Request
    index: int
    name: str  # unique among all that is asked
    model: str  # the engine's name for it
    end: frozenset[int]
    room: int
    priority: int = 0  # the lowest goes first
    salt: str | None = None

    @property
    def seed(self) -> int | None:
        """The sequence's own; each of several has another."""
        seed = self.request.params.seed
        if seed is None:
            return None
        return (seed_of(seed, self.index) if self.index else seed) & _MAX_SEED

    @property
    def max_tokens(self) -> int:
        """At least 1: no engine generates nothing."""
        most = self.request.params.max_tokens
        return max(1, self.room if most is None else min(most, self.room))

    @property
    def stop_token_ids(self) -> list[int]:
        params = self.request.params
        stop = {*params.stop_token_ids, *(() if params.ignore_eos else self.end)}
        if self.request.grammar is not None:
            stop |= self.end  # a complete grammar allows the end token
        return sorted(stop)

    @property
    def prompt_logprobs(self) -> int | None:
        return self.request.params.prompt_logprobs if self.index == 0 else None


class Told(NamedTuple):
    """One event of an answer. `usage` is what the engine says it computed and had, as it came."""

    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    by_string: bool = False  # it ends with a stop string, and its last token has text
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    usage: Mapping[str, Any] | None = None


class Protocol(TypingProtocol):
    """An engine's own HTTP interface, for token ids."""

    @property
    def path(self) -> str: ...

    def check(self, request: Request) -> None:
        """Raises InvalidParameter, by name, for what this engine cannot do."""
        ...

    def body(self, ask: SequenceAsk) -> dict[str, Any]: ...

    def told(self, event: Mapping[str, Any], ask: SequenceAsk, num_tokens: int) -> Told:
        """Reads an event of the answer, of which `num_tokens` are known. Raises KeyError, TypeError
        or ValueError for what it does not understand."""
        ...


def finish_of(reason: str | None) -> FinishReason | None:
    """Our finish reason for theirs. A reason that we do not have is an error."""
    return None if reason is None else _FINISHES.get(reason, FinishReason.ERROR)


def cached_of(usage: object, num_prompt: int) -> Mapping[str, int] | None:
    """How many of a prompt's tokens were cached, by tier. None if the usage does not say, or
    contradicts itself or the prompt: then nothing is guessed."""
    if not isinstance(usage, Mapping) or usage.get("prompt_tokens") != num_prompt:
        return None
    details = usage.get("prompt_tokens_details")
    if not isinstance(details, Mapping):
        return None
    cached, tiers = details.get("cached_tokens"), details.get(TIERS)
    if not _is_count(cached) or cached > num_prompt:
        return None
    split = tiers if isinstance(tiers, Mapping) and set(tiers) <= set(TierName) else {}
    is_whole = all(map(_is_count, split.values())) and sum(split.values()) == cached
    return split if is_whole else {TierName.DEVICE: cached}


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
