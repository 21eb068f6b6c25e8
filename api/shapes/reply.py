"""Reads one choice of a chat's answer into reasoning, text and calls, for every protocol."""

import uuid
from dataclasses import dataclass, field

from api.job import Delta
from api.tools.pieces import CallArguments, CallStart, Parser, Piece, Text, Thought
from api.tools.style import Style
from engine.request import FinishReason, TokenLogprob

MISTRAL_ID_CHARS = 9  # its templates require ids of nine letters or digits


@dataclass(slots=True)
class ToolCall:
    """One call of a tool."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    @property
    def written(self) -> str:
        """The arguments as JSON text."""
        return "".join(self.arguments)


@dataclass(slots=True)
class Reply:
    """The content of one choice so far."""

    parser: Parser
    style: Style = Style.HERMES
    only_calls: bool = False  # a forced call that is cut before its name is no text
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    reasoning_tokens: int = 0
    _thinking: bool = False

    def read(self, delta: Delta) -> list[Piece]:
        """Takes in a delta and returns the pieces it adds."""
        pieces = self.parser.feed(delta.text)
        if delta.finish is not None:
            self.finish, self.stop = delta.finish, delta.stop
            pieces += self.parser.finish()
        if self.only_calls:
            pieces = [piece for piece in pieces if not isinstance(piece, Text)]
        if pieces:
            self._thinking = all(isinstance(piece, Thought) for piece in pieces)
        self.reasoning_tokens += len(delta.tokens) if self._thinking else 0
        self.logprobs += delta.logprobs
        for piece in pieces:
            self._take(piece)
        return pieces

    def _take(self, piece: Piece) -> None:
        match piece:
            case Text(text):
                self.texts.append(text)
            case Thought(text):
                self.thoughts.append(text)
            case CallStart(_, name):
                self.calls.append(ToolCall(self._call_id(), name))
            case CallArguments(index, text):
                self.calls[index].arguments.append(text)

    def _call_id(self) -> str:
        name = uuid.uuid4().hex
        return name[:MISTRAL_ID_CHARS] if self.style is Style.MISTRAL else f"call_{name[:24]}"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def thought(self) -> str:
        return "".join(self.thoughts)

    @property
    def called(self) -> bool:
        """Whether it ended with calls for the client to run."""
        return bool(self.calls) and self.finish is FinishReason.STOP

    @property
    def finish_reason(self) -> str | None:
        """In OpenAI's words."""
        return "tool_calls" if self.called else self.finish
