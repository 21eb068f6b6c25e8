"""Incremental reader of one call as a JSON object: `{"name": "f", "arguments": {...}}`."""

import json
from collections.abc import Collection
from enum import Enum, auto

from api.tools.pieces import CallArguments, CallStart, Piece

ARGUMENTS = frozenset({"arguments", "parameters"})
_SPACE = " \t\r\n"


class ValueReader:
    """Finds the end of one JSON value. The caller must skip white space before it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False
        self._begun = False
        self.done = False

    def feed(self, text: str, start: int = 0) -> int:
        """The index after the part that belongs to the value. Sets `done` at its end."""
        for place in range(start, len(text)):
            if self._take(text[place]):
                self.done = True
                return place if self._scalar else place + 1
        return len(text)

    def _take(self, char: str) -> bool:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return not self._depth
            return False
        if self._scalar:
            return char in ",}]" or char in _SPACE
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        elif not self._begun:
            self._scalar = True
        self._begun = True
        return False


class _State(Enum):
    OPEN = auto()  # before the brace
    KEY = auto()  # before a key, or the end
    COLON = auto()
    BEFORE = auto()  # before a value
    VALUE = auto()
    AFTER = auto()  # before a comma or the end


class CallReader:
    """Reads one object. Ends as `done` or as `failed`, which means it was no call; `raw` is its
    text.

    If `names` are given, only an object that names one of them is a call.
    """

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        self._index = index
        self._names = names
        self._state = _State.OPEN
        self._reader = ValueReader()
        self._key = ""
        self._value = ""
        self._name: str | None = None
        self._arguments = ""  # read before the name
        self._has_arguments = False
        self.raw = ""
        self.started = False
        self.done = False
        self.failed = False

    def feed(self, text: str) -> tuple[list[Piece], str]:
        """The pieces of `text`, and the rest of it after the object."""
        pieces: list[Piece] = []
        place = 0
        while place < len(text) and not self.done and not self.failed:
            if self._state in (_State.VALUE, _State.KEY) and self._value:
                place = self._read_value(text, place, pieces)
            else:
                place = self._between(text[place], place, pieces)
        self.raw += text[:place]
        return pieces, text[place:]

    def _between(self, char: str, place: int, pieces: list[Piece]) -> int:
        """Reads one character outside keys and values; returns the next index."""
        if char in _SPACE:
            return place + 1
        match self._state, char:
            case _State.OPEN, "{":
                self._state = _State.KEY
            case (_State.KEY, '"') | (_State.BEFORE, _):
                if self._state is _State.BEFORE:
                    self._state = _State.VALUE
                self._reader, self._value = ValueReader(), char
                self._reader.feed(char)
                if self._state is _State.VALUE and self._streams:
                    pieces += self._argue(char)
            case _State.COLON, ":":
                self._state = _State.BEFORE
            case _State.AFTER, ",":
                self._state = _State.KEY
            case ((_State.AFTER | _State.KEY), "}"):
                self._end(pieces)
            case _:
                self._fail()
                return place
        return place + 1

    @property
    def _streams(self) -> bool:
        """Whether the value's text is passed on as it comes: arguments that are an object."""
        return self._key in ARGUMENTS and self._value[:1] == "{" and not self._has_arguments

    def _read_value(self, text: str, place: int, pieces: list[Piece]) -> int:
        end = self._reader.feed(text, place)
        new = text[place:end]
        if self._state is _State.VALUE and self._streams and new:
            pieces += self._argue(new)
        self._value += new
        if self._reader.done:
            self._take_value(pieces)
        return end

    def _take_value(self, pieces: list[Piece]) -> None:
        value = self._value
        if self._state is _State.KEY:
            self._key, self._state = _text(value) or "", _State.COLON
        else:
            if self._key == "name":
                self._learn(_text(value), pieces)
            elif self._key in ARGUMENTS and not self._has_arguments:
                if value[:1] != "{":  # arguments as a string, or null
                    pieces += self._argue(_text(value) or "{}")
                self._has_arguments = True
            self._state = _State.AFTER
        self._value = ""

    def _learn(self, name: str | None, pieces: list[Piece]) -> None:
        if self._name is not None:
            return
        if not name or (self._names is not None and name not in self._names):
            self._fail()
            return
        self._name = name
        if self._arguments:
            pieces += self._argue("")

    def _argue(self, text: str) -> list[Piece]:
        if self._name is None:
            self._arguments += text
            return []
        pieces: list[Piece] = []
        if not self.started:
            self.started = True
            pieces.append(CallStart(self._index, self._name))
        text, self._arguments = self._arguments + text, ""
        if text:
            pieces.append(CallArguments(self._index, text))
        return pieces

    def _end(self, pieces: list[Piece]) -> None:
        if self._name is None:
            self._fail()
            return
        if not self._has_arguments:
            pieces += self._argue("{}")
        self.done = True

    def _fail(self) -> None:
        if self.started:
            self.done = True
        else:
            self.failed = True


def _text(value: str) -> str | None:
    """The value of a JSON string; None for anything else."""
    try:
        read = json.loads(value, strict=False)
    except ValueError:
        return None
    return read if isinstance(read, str) else None
