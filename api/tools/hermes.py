"""Hermes' and Qwen's style: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from api.tools.json_call import CallParser
from api.tools.pieces import Piece, cut

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(CallParser):
    """Content between the markers that is no call is text, including the markers."""

    def _say(self, pieces: list[Piece]) -> bool:
        before, marker, self._buffer = cut(self._buffer, (OPEN,))
        pieces += self._prose.say(before)
        if marker is not None:
            self._open(OPEN)
        return marker is not None

    def _after(self, pieces: list[Piece]) -> bool:
        _, marker, self._buffer = cut(self._buffer, (CLOSE, OPEN))
        if marker == OPEN:
            self._open(OPEN)
        elif marker is not None:
            self._step = self._say
        return marker is not None
