"""Mistral's style: `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name{...}` for each."""

from api.tools.json_call import CallParser, ValueReader
from api.tools.pieces import CallArguments, CallStart, Piece, cut

CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
_BETWEEN = " \t\r\n,"


class MistralParser(CallParser):
    """Reads both forms.

    The list is used since version 3 of the 7B, names before arguments since version 11 of the
    tokenizer.
    """

    _value = ValueReader()  # of the arguments after a name

    def finish(self) -> list[Piece]:
        if self._step == self._name:
            self._buffer, self._step = CALLS + self._buffer, self._say
        return super().finish()

    def _say(self, pieces: list[Piece]) -> bool:
        before, marker, self._buffer = cut(self._buffer, (CALLS,))
        pieces += self._prose.say(before)
        if marker is not None:
            self._step = self._form
        return marker is not None

    def _form(self, _: list[Piece]) -> bool:
        """Detects the form by the first character."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._buffer[0] == "[":
            self._buffer = self._buffer[1:]
        self._step = self._after if self._buffer[:1] in ("{", "") else self._name
        return True

    def _after(self, pieces: list[Piece]) -> bool:
        """Reads objects until something else follows."""
        self._buffer = self._buffer.lstrip(_BETWEEN)
        if self._buffer[:1] == "{":
            self._open(CALLS)
        elif self._buffer:
            self._buffer = self._buffer.removeprefix("]")
            self._step = self._say
        return bool(self._buffer)

    def _name(self, pieces: list[Piece]) -> bool:
        place = self._buffer.find("{")
        if place < 0:
            return False
        name = self._buffer[:place].split(ARGS)[0].split(CALL_ID)[0].strip()
        self._buffer = self._buffer[place:]
        pieces.append(CallStart(self._num_calls, name))
        self._value, self._step = ValueReader(), self._arguments
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        end = self._value.feed(self._buffer)
        if end:
            pieces.append(CallArguments(self._num_calls, self._buffer[:end]))
        self._buffer = self._buffer[end:]
        if self._value.done:
            self._end_call()
            self._step = self._say
        return self._value.done
