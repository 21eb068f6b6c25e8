"""The tokens of a chat's recent turns, for the next turn to compare with or continue.

A client sends the whole conversation again with each turn. The template may render an old message
differently (without its reasoning, say), or the tokenizer may split the old answer into other
tokens than were generated. Then the new prompt diverges from the cached tokens before the messages
do, and the rest is computed again. `Conversations` remembers recent turns' tokens under each
tenant's salt, and reports at which token a new turn diverged and why. Answers are also written to
`kept`, and `recall` loads them after a restart. Event loop only.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import xxhash

from api.job import Divergence, DivergenceReason, Transcript, Turn
from api.requests.kept import NOTHING, KeptBodies, Recent, owner_of
from tiers.blocks.keys import CacheScope

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

MAX_TOKENS = 1 << 20  # of all turns in memory, 4 MiB; `recall` loads those on disk
MIN_ENTRY_TOKENS = 64  # minimum count of a turn, for its keys and its entry
_LOOKED_AT = 16  # tokens after the divergence whose text gives the reason


@dataclass(frozen=True, slots=True)
class _Left:
    """A remembered turn: the first `num_tokens` of `tokens` belong to the messages of its key.

    `rest` is the answer's text after them: the part of a token before a stop string. None if the
    tokens cannot represent the text.
    """

    tokens: "array[int]"
    num_tokens: int
    rest: str | None = None

    def packed(self) -> bytes:
        head = orjson.dumps([self.num_tokens, self.rest])
        return head + b"\n" + self.tokens.tobytes()

    @classmethod
    def unpacked(cls, body: bytes) -> "_Left | None":
        """None for a body that this version cannot read."""
        try:
            head, _, tokens = body.partition(b"\n")
            num_tokens, rest = orjson.loads(head)
            left = cls(array("i", tokens), int(num_tokens), rest)
        except (ValueError, TypeError):
            return None
        return left if 0 <= left.num_tokens <= len(left.tokens) else None


@dataclass(frozen=True, slots=True)
class TurnReplay:
    """A conversation's tokens up to and including message number `place`, and the text after
    them."""

    place: int
    tokens: "array[int]"
    rest: str


def turn_of(
    scope: CacheScope,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    goes_on: bool = False,
) -> Turn:
    """The keys of a conversation's beginnings. They differ by tenant, model, tools and arguments of
    the template, of which it may render all before the messages."""
    key = xxhash.xxh3_128_digest(scope.root() + orjson.dumps(tools or None))
    if arguments:
        key = xxhash.xxh3_128_digest(key + orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS))
    keys = []
    for message in messages:
        key = _continued(key, message)
        keys.append(key)
    roles = tuple(str(message["role"]) for message in messages)
    return Turn(tuple(keys), roles, scope.tenant, goes_on)


def assistant_message(text: str) -> Mapping[str, Any]:
    """A text-only answer, as the next turn sends it back."""
    return {"role": "assistant", "content": text}


class Conversations:
    """Recent turns by key, at most `max_tokens` in all; the least recently used leave first."""

    def __init__(self, max_tokens: int = MAX_TOKENS, kept: KeptBodies = NOTHING) -> None:
        self._kept = kept
        self._turns = Recent[_Left](max_tokens, lambda it: max(MIN_ENTRY_TOKENS, len(it.tokens)))

    @property
    def num_tokens(self) -> int:
        return self._turns.weight

    async def recall(self, turn: Turn) -> None:
        """Load the conversation's latest answer from disk if it is not in memory."""
        for key in reversed(turn.keys):
            if key in self._turns:
                return
            if key in self._kept:
                body = await self._kept.read(key)
                left = _Left.unpacked(body) if body is not None else None
                if left is not None:
                    self._turns.put(key, owner_of(turn.salt), left)
                    return

    def forget(self, owner: bytes) -> None:
        """Find no turn of one owner any more, here or on disk."""
        self._turns.forget(owner)
        self._kept.forget(owner)

    def divergence(
        self, turn: Turn, tokens: "array[int]", tokenizer: "Tokenizer"
    ) -> Divergence | None:
        """Where `tokens` diverge from those of the longest known beginning of the conversation.

        None if they do not diverge, or nothing is known.
        """
        left = self._known(turn)
        if left is None:
            return None
        at = common_length(left.tokens[: left.num_tokens], tokens)
        if at == left.num_tokens:
            return None
        reason = _reason(tokenizer, left.tokens[at:], tokens[at:])
        return Divergence(at, left.num_tokens, reason)

    def replay(self, turn: Turn) -> TurnReplay | None:
        """What to continue from: the last answer whose tokens are known."""
        for place in reversed(range(len(turn.keys))):
            if turn.roles[place] != "assistant":
                continue
            left = self._turns.find(turn.keys[place])
            if left is not None and left.rest is not None:
                return TurnReplay(place, left.tokens[: left.num_tokens], left.rest)
        return None

    def remember(
        self,
        turn: Turn,
        prompt: "array[int]",
        answers: Sequence[Transcript],
        tokenizer: "Tokenizer",
        message_of: Callable[[str], Mapping[str, Any]] = assistant_message,
    ) -> None:
        """Remember a served turn: its prompt, and its prompt with each answer."""
        owner = owner_of(turn.salt)
        self._turns.put(turn.keys[-1], owner, _Left(prompt, len(prompt)))
        for answer in answers:
            key = _continued(turn.answered_key, message_of(answer.text))
            tokens = prompt + array("i", answer.tokens)
            num_told, rest = _num_spelled(tokenizer, answer)
            left = _Left(tokens, len(prompt) + num_told, rest)
            self._turns.put(key, owner, left)
            self._kept.write(key, owner, left.packed())
        for key in [key for key in turn.keys if key in self._kept][:-1]:
            self._kept.delete(key)  # superseded by later turns

    def _known(self, turn: Turn) -> _Left | None:
        """The longest known run of the messages before the last.

        A turn known without its answer counts only if an answer follows, because the template's
        generation prompt at the end of a prompt is no message.
        """
        following = [*turn.roles[1:], None]
        for key, role, after in reversed(list(zip(turn.keys, turn.roles, following, strict=True))):
            left = self._turns.find(key) if "assistant" in (role, after) else None
            if left is not None:
                return left
        return None


def _continued(key: bytes, message: Mapping[str, Any]) -> bytes:
    fields = {name: value for name, value in message.items() if value is not None}
    if message["role"] == "assistant":
        fields = _canonical(message)
    return xxhash.xxh3_128_digest(key + orjson.dumps(fields, option=orjson.OPT_SORT_KEYS))


def common_length(old: "array[int]", new: "array[int]") -> int:
    """The number of equal leading tokens."""
    size = min(len(old), len(new))
    differ = np.flatnonzero(np.frombuffer(old[:size], "i4") != np.frombuffer(new[:size], "i4"))
    return int(differ[0]) if len(differ) else size


def _canonical(message: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of an answer that clients send back unchanged: without its reasoning, the ids of
    its calls and the spelling of their arguments."""
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return {"role": "assistant", "content": (message.get("content") or "").strip(), "calls": calls}


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return [call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            arguments = str(arguments)
    return [function.get("name"), arguments]


def _num_spelled(tokenizer: "Tokenizer", answer: Transcript) -> tuple[int, str | None]:
    """The number of the answer's tokens that are wholly in its text, and the text after them.

    The end of the sequence and tokens in which a stop string begins do not count. Special tokens
    without text count if others follow.
    """
    text, place, num_told = answer.text.encode(), 0, 0
    for number, token in enumerate(answer.tokens):
        piece = tokenizer.token_bytes(token)
        if piece and text[place : place + len(piece)] == piece:
            place += len(piece)
            num_told = number + 1
        elif token not in tokenizer.special_token_ids:
            break
    try:
        return num_told, text[place:].decode()
    except UnicodeDecodeError:
        return num_told, None


def _reason(tokenizer: "Tokenizer", old: "array[int]", new: "array[int]") -> DivergenceReason:
    """TOKENIZER if the same text continues on both sides, for the length of the first token on
    either."""
    pieces = [[tokenizer.token_bytes(t) for t in side[:_LOOKED_AT]] for side in (old, new)]
    longest = max((len(side[0]) for side in pieces if side), default=0)
    texts = [b"".join(side) for side in pieces]
    same = 0
    for one, other in zip_longest(*texts):
        if one != other:
            break
        same += 1
    return DivergenceReason.TOKENIZER if longest and same >= longest else DivergenceReason.TEMPLATE
