"""Calls as bare JSON.

Llama 3 writes `{"name": ..., "parameters": ...}`, one or several in a row. Mistral's models write a
list after `[TOOL_CALLS]`.
"""

from collections.abc import Collection

from api.tools.json_call import CallReader
from api.tools.pieces import Piece, Prose, Stepwise, cut

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class JsonParser(Stepwise):
    """Reads an answer that consists of calls, from its beginning or from `<|python_tag|>` on.

    Only an object that names one of `names` is a call: the model may answer in JSON too.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._prose = Prose()
        self._reader: CallReader | None = None
        self._skipped = ""  # white space and separators before an object
        self._looking = True
        self._num_calls = 0

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._reader is not None:
            if not self._reader.started:
                pieces += self._prose.say(self._skipped + self._reader.raw)
        elif not self._num_calls or not self._looking:
            pieces += self._prose.say(self._skipped + self._buffer)
        return pieces + self._prose.finish()

    def _step(self, pieces: list[Piece]) -> bool:
        if self._reader is not None:
            return self._read(self._reader, pieces)
        if self._looking:
            return self._look(pieces)
        before, marker, self._buffer = cut(self._buffer, (PYTHON_TAG,))
        pieces += self._prose.say(before)
        if marker is not None:
            self._prose.drop()
            self._looking = True
        return marker is not None

    def _look(self, pieces: list[Piece]) -> bool:
        """Looks for the beginning of an object."""
        rest = self._buffer.lstrip(_BETWEEN if self._num_calls else None)
        self._skipped += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if PYTHON_TAG.startswith(rest[: len(PYTHON_TAG)]):
            if len(rest) < len(PYTHON_TAG):
                return False
            self._buffer = rest[len(PYTHON_TAG) :]
            return True
        if rest[0] == "{":
            self._reader = CallReader(self._num_calls, self._names)
        else:
            self._looking = False
            self._buffer, self._skipped = self._skipped + rest, ""
        return True

    def _read(self, reader: CallReader, pieces: list[Piece]) -> bool:
        read, self._buffer = reader.feed(self._buffer)
        pieces += read
        if reader.failed:
            self._buffer = self._skipped + reader.raw + self._buffer
            self._looking = False
        elif reader.done:
            self._prose.drop()
            self._num_calls += 1
        if reader.failed or reader.done:
            self._reader, self._skipped = None, ""
        return reader.failed or reader.done
