"""DeepSeek's style: calls between its own markers, in the form of V3 and R1 or of V3.1."""

from api.tools.json_call import CallParser
from api.tools.pieces import CallArguments, CallStart, Piece, Prose, cut

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```json"


class DeepSeekParser(CallParser):
    """Reads both forms.

    V3 and R1 write `function SEPARATOR name` and the arguments in a fence. V3.1 writes `name
    SEPARATOR arguments`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arguments = Prose()
        self._ends: tuple[str, ...] = (CALL_END,)

    def finish(self) -> list[Piece]:
        said = self._spoken(self._buffer) if self._step == self._argue else []
        return said + super().finish()

    def _say(self, pieces: list[Piece]) -> bool:
        before, marker, self._buffer = cut(self._buffer, (CALLS_BEGIN, CALLS_END, CALL_BEGIN))
        pieces += self._prose.say(before)
        if marker is not None:
            self._prose.drop()
        if marker == CALL_BEGIN:
            self._step = self._header
        return marker is not None

    def _header(self, pieces: list[Piece]) -> bool:
        header, marker, rest = self._buffer.partition(SEPARATOR)
        if not marker:
            return False
        if header.strip() == "function":
            name, fence, rest = rest.partition(_FENCE)
            if not fence:
                return False
            self._ends = ("```", CALL_END)
        else:
            name, self._ends = header, (CALL_END,)
        self._buffer = rest
        self._arguments = Prose(skip_leading=True)
        pieces.append(CallStart(self._num_calls, name.strip()))
        self._step = self._argue
        return True

    def _argue(self, pieces: list[Piece]) -> bool:
        before, marker, self._buffer = cut(self._buffer, self._ends)
        pieces += self._spoken(before)
        if marker is None:
            return False
        self._num_calls += 1
        self._step = self._close if marker != CALL_END else self._say
        return True

    def _close(self, pieces: list[Piece]) -> bool:
        """The step after the fence."""
        _, marker, self._buffer = cut(self._buffer, (CALL_END,))
        if marker is not None:
            self._step = self._say
        return marker is not None

    def _spoken(self, text: str) -> list[Piece]:
        """Arguments without surrounding white space."""
        said = self._arguments.say(text)
        return [CallArguments(self._num_calls, piece.text) for piece in said]  # type: ignore[union-attr]
