"""Where the next turn of a chat parts from the tokens that its earlier turn left in the cache.

A client sends the whole conversation again with each turn. If the model's template writes an old
message differently (without its reasoning, say), or the tokenizer cuts the old answer differently
from how it was generated, the new prompt parts from the cached tokens before the messages do, and
what follows is computed again. `Conversations` remembers recent turns' tokens, each under its own
tenant's salt, and says at which token a new turn parted and why. Event loop only.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any

import numpy as np
import orjson
import xxhash

from api.collaborators import Tokenizer
from tiers.blocks.keys import CacheScope

MIN_ENTRY_TOKENS = 64  # what a turn counts at least, for its keys and its place
_LOOKED_AT = 16  # tokens after the parting whose text tells the reason


class PartReason(StrEnum):
    """Why a turn's tokens part from the earlier turn's although the messages agree."""

    TEMPLATE = "template"  # it writes the old messages as another text
    TOKENIZER = "tokenizer"  # the same text, in other tokens than it was generated in


@dataclass(frozen=True, slots=True)
class Parting:
    """`of_tokens` the earlier turn left for messages that came again; only `at_token` match."""

    at_token: int
    of_tokens: int
    reason: PartReason


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's messages: `keys[i]` names the conversation up to and with message i."""

    keys: tuple[bytes, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """One choice of an answer: what the client read, and the tokens it was generated in."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Left:
    """What a turn left: of `tokens`, the first `num_tokens` belong to the messages of its key."""

    tokens: "array[int]"
    num_tokens: int


def turn_of(
    scope: CacheScope,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Turn:
    """The names of a conversation's beginnings; other tenants, models and tools name others."""
    key = xxhash.xxh3_128_digest(scope.root() + orjson.dumps(tools or None))
    keys = []
    for message in messages:
        key = _continued(key, message)
        keys.append(key)
    return Turn(tuple(keys), tuple(str(message["role"]) for message in messages))


class Conversations:
    """Recent turns by name, least recently used out first, at most `max_tokens` in all."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._turns: OrderedDict[bytes, _Left] = OrderedDict()
        self.num_tokens = 0

    def parting(self, turn: Turn, tokens: "array[int]", tokenizer: Tokenizer) -> Parting | None:
        """Where `tokens` part from what the longest known beginning of the conversation left;
        None where they do not part, or nothing is known."""
        left = self._known(turn)
        if left is None:
            return None
        at = _common(left.tokens, tokens, left.num_tokens)
        if at == left.num_tokens:
            return None
        reason = _reason(tokenizer, left.tokens[at:], tokens[at:])
        return Parting(at, left.num_tokens, reason)

    def remember(
        self,
        turn: Turn,
        prompt: "array[int]",
        answers: Sequence[Transcript],
        tokenizer: Tokenizer,
    ) -> None:
        """Keep a served turn: its prompt, and its prompt with each answer."""
        self._keep(turn.keys[-1], _Left(prompt, len(prompt)))
        for answer in answers:
            message = {"role": "assistant", "content": answer.text}
            tokens = prompt + array("i", answer.tokens)
            num_told = _num_told(tokenizer, answer)
            self._keep(_continued(turn.keys[-1], message), _Left(tokens, len(prompt) + num_told))

    def _known(self, turn: Turn) -> _Left | None:
        """Of the messages that came before the last, the most that are known.

        A turn that is known without its answer counts only where an answer follows: what a
        template puts at a prompt's end for the answer to follow is no message.
        """
        following = [*turn.roles[1:], None]
        for key, role, after in reversed(list(zip(turn.keys, turn.roles, following, strict=True))):
            left = self._turns.get(key)
            if left is not None and "assistant" in (role, after):
                self._turns.move_to_end(key)
                return left
        return None

    def _keep(self, key: bytes, left: _Left) -> None:
        self._forget(key)
        self._turns[key] = left
        self.num_tokens += _weight(left)
        while self.num_tokens > self._max_tokens:
            self._forget(next(iter(self._turns)))

    def _forget(self, key: bytes) -> None:
        old = self._turns.pop(key, None)
        if old is not None:
            self.num_tokens -= _weight(old)


def _continued(key: bytes, message: Mapping[str, Any]) -> bytes:
    told = {name: value for name, value in message.items() if value is not None}
    return xxhash.xxh3_128_digest(key + orjson.dumps(told, option=orjson.OPT_SORT_KEYS))


def _weight(left: _Left) -> int:
    return max(MIN_ENTRY_TOKENS, len(left.tokens))


def _common(old: "array[int]", new: "array[int]", most: int) -> int:
    """How many leading tokens are the same, at most `most`."""
    size = min(most, len(new))
    differ = np.flatnonzero(np.frombuffer(old[:size], "i4") != np.frombuffer(new[:size], "i4"))
    return int(differ[0]) if len(differ) else size


def _num_told(tokenizer: Tokenizer, answer: Transcript) -> int:
    """The answer's tokens that are wholly in its text: not the end of sequence, not a stop
    string."""
    room = len(answer.text.encode())
    for number, token in enumerate(answer.tokens):
        room -= len(tokenizer.token_bytes(token))
        if room < 0:
            return number
    return len(answer.tokens)


def _reason(tokenizer: Tokenizer, old: "array[int]", new: "array[int]") -> PartReason:
    """Whether the same text goes on, for as long as the first token on either side is."""
    pieces = [[tokenizer.token_bytes(t) for t in side[:_LOOKED_AT]] for side in (old, new)]
    longest = max((len(side[0]) for side in pieces if side), default=0)
    texts = [b"".join(side) for side in pieces]
    same = 0
    for one, other in zip_longest(*texts):
        if one != other:
            break
        same += 1
    return PartReason.TOKENIZER if longest and same >= longest else PartReason.TEMPLATE
