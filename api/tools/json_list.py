"""Calls as bare JSON.

Llama 3 writes `{"name": ..., "parameters": ...}`, one or several in a row. So do models of other
styles where a grammar makes them call.
"""

from collections.abc import Collection

from api.tools.json_call import CallParser
from api.tools.pieces import Piece, cut

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class JsonParser(CallParser):
    """Reads an answer that consists of calls, from its beginning or from `<|python_tag|>` on.

    Only an object that names one of `names` is a call: the model may answer in JSON too.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._skipped = ""  # white space and separators before an object
        self._step = self._after

    def finish(self) -> list[Piece]:
        if self._step == self._after and not self._num_calls:
            self._buffer, self._step = self._skipped + self._buffer, self._say
        return super().finish()

    def _say(self, pieces: list[Piece]) -> bool:
        before, marker, self._buffer = cut(self._buffer, (PYTHON_TAG,))
        pieces += self._prose.say(before)
        if marker is not None:
            self._prose.drop()
            self._step, self._skipped = self._after, ""
        return marker is not None

    def _after(self, pieces: list[Piece]) -> bool:
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
            self._open(self._skipped, self._names)
        else:
            self._buffer, self._step = self._skipped + rest, self._say
        self._skipped = ""
        return True
