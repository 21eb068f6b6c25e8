"""gpt-oss' style (harmony): messages in channels, `<|channel|>NAME<|message|>TEXT<|end|>`."""

import re

from api.tools.pieces import CallArguments, CallStart, Piece, Stepwise, Text, Thought, cut

CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
START = "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
MARKERS = (CHANNEL, MESSAGE, "<|constrain|>", *ENDS)

_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class HarmonyParser(Stepwise):
    """Reads messages by channel.

    The channel analysis is reasoning. Commentary to a function is a call if the answer may call.
    Everything else is text. `begun`: the prompt ends inside a message, whose text goes on.
    """

    def __init__(self, *, may_call: bool = True, begun: bool = False) -> None:
        self._may_call = may_call
        self._in_message = begun
        self._kind: type[Text] | type[Thought] | None = Text  # None: a call's arguments
        self._num_calls = 0

    def finish(self) -> list[Piece]:
        if self._in_message:
            return self._said(self._buffer)
        has_header = CHANNEL in self._buffer or START in self._buffer
        return [] if has_header or not self._buffer.strip() else [Text(self._buffer)]

    def _step(self, pieces: list[Piece]) -> bool:
        if not self._in_message:
            header, begun, rest = self._buffer.partition(MESSAGE)
            if begun:
                self._buffer, self._in_message = rest, True
                pieces += self._open(header)
            return bool(begun)
        before, marker, self._buffer = cut(self._buffer, ENDS)
        pieces += self._said(before)
        if marker is not None:
            self._num_calls += self._kind is None
            self._in_message = False
        return marker is not None

    def _open(self, header: str) -> list[Piece]:
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._may_call:
            self._kind = None
            return [CallStart(self._num_calls, recipient[1])]
        channel = header.partition(CHANNEL)[2].partition("<|")[0].split()
        self._kind = Thought if channel[:1] == ["analysis"] else Text
        return []

    def _said(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._kind is None:
            return [CallArguments(self._num_calls, text)]
        return [self._kind(text)]
