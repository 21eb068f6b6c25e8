"""Hermes' and Qwen's style: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from api.tools.json_call import CallReader
from api.tools.pieces import Piece, Prose, Stepwise, cut

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(Stepwise):
    """Content between the markers that is no call is text, including the markers."""

    def __init__(self) -> None:
        self._prose = Prose()
        self._reader: CallReader | None = None
        self._closing = False
        self._num_calls = 0

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._reader is not None and not self._reader.started:
            pieces += self._prose.say(OPEN + self._reader.raw)
        if self._reader is None and not self._closing:
            pieces += self._prose.say(self._buffer)
        return pieces + self._prose.finish()

    def _step(self, pieces: list[Piece]) -> bool:
        """Takes one step; False if it needs more text."""
        if self._closing:
            _, marker, self._buffer = cut(self._buffer, (CLOSE, OPEN))
            if marker is None:
                return False
            self._closing = False
            self._reader = CallReader(self._num_calls) if marker == OPEN else None
            return True
        if self._reader is None:
            before, marker, self._buffer = cut(self._buffer, (OPEN,))
            pieces += self._prose.say(before)
            if marker is None:
                return False
            self._reader = CallReader(self._num_calls)
        return self._read(self._reader, pieces)

    def _read(self, reader: CallReader, pieces: list[Piece]) -> bool:
        read, self._buffer = reader.feed(self._buffer)
        pieces += read
        if reader.failed:
            pieces += self._prose.say(OPEN + reader.raw)
            self._reader = None
        elif reader.done:
            self._prose.drop()
            self._num_calls += 1
            self._reader, self._closing = None, True
        return reader.failed or reader.done
