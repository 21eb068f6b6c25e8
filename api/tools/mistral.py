"""Mistral's style: `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name{...}` for each."""

from api.tools.json_call import CallReader, ValueReader
from api.tools.pieces import CallArguments, CallStart, Piece, Prose, Stepwise, cut

CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
_BETWEEN = " \t\r\n,"


class MistralParser(Stepwise):
    """Reads both forms.

    The list is used since version 3 of the 7B, names before arguments since version 11 of the
    tokenizer.
    """

    def __init__(self) -> None:
        self._prose = Prose()
        self._step = self._say
        self._reader: CallReader | None = None
        self._value: ValueReader | None = None
        self._num_calls = 0

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._reader is not None and not self._reader.started and self._reader.raw:
            pieces += self._prose.say(CALLS + self._reader.raw)
        elif self._step == self._say:
            pieces += self._prose.say(self._buffer)
        elif self._step == self._name:
            pieces += self._prose.say(CALLS + self._buffer)
        return pieces + self._prose.finish()

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
        self._step = self._list if self._buffer[:1] in ("{", "") else self._name
        return True

    def _list(self, pieces: list[Piece]) -> bool:
        """Reads objects until something else follows."""
        if self._reader is None:
            self._buffer = self._buffer.lstrip(_BETWEEN)
            if not self._buffer:
                return False
            if self._buffer[0] != "{":
                self._buffer = self._buffer.removeprefix("]")
                self._step = self._say
                return True
            self._reader = CallReader(self._num_calls)
        read, self._buffer = self._reader.feed(self._buffer)
        pieces += read
        if self._reader.failed:
            pieces += self._prose.say(CALLS + self._reader.raw)
            self._reader, self._step = None, self._say
            return True
        if self._reader.done:
            self._end_call()
            self._reader = None
            return True
        return False

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
        assert self._value is not None
        end = self._value.feed(self._buffer)
        if end:
            pieces.append(CallArguments(self._num_calls, self._buffer[:end]))
        self._buffer = self._buffer[end:]
        if self._value.done:
            self._end_call()
            self._step = self._say
        return self._value.done

    def _end_call(self) -> None:
        self._prose.drop()
        self._num_calls += 1
