"""Reasoning between `<think>` and `</think>`, before the rest of an answer."""

from api.tools.pieces import Parser, Piece, Prose, Stepwise, Thought, cut

OPEN = "<think>"
CLOSE = "</think>"


class ThinkParser(Stepwise):
    """Separates reasoning from the rest of an answer. `opened`: the prompt ends inside
    reasoning."""

    def __init__(self, inner: Parser, *, opened: bool) -> None:
        self._inner = inner
        self._thought = Prose(Thought, skip_leading=True)
        self._step = self._think if opened else self._look

    def finish(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        if self._step == self._think:
            return self._thought.say(rest)
        return [*self._inner.feed(rest), *self._inner.finish()]

    def _look(self, _: list[Piece]) -> bool:
        """Checks whether the answer begins with reasoning."""
        begun = self._buffer.lstrip()
        if OPEN.startswith(begun[: len(OPEN)]):
            if len(begun) < len(OPEN):
                return False
            self._buffer = begun[len(OPEN) :]
            self._step = self._think
        else:
            self._step = self._pass_on
        return True

    def _think(self, pieces: list[Piece]) -> bool:
        before, marker, self._buffer = cut(self._buffer, (CLOSE,))
        pieces += self._thought.say(before)
        if marker is not None:
            self._step = self._skip
        return marker is not None

    def _skip(self, _: list[Piece]) -> bool:
        """Skips white space between the reasoning and the answer."""
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._pass_on
        return bool(self._buffer)

    def _pass_on(self, pieces: list[Piece]) -> bool:
        text, self._buffer = self._buffer, ""
        pieces += self._inner.feed(text)
        return False
