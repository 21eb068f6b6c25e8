"""Incremental reader of calls as JSON objects: `{"name": "f", "arguments": {...}}`."""

import json
import re
from collections.abc import Collection
from typing import Any, Final

from api.tools.pieces import CallArguments, CallStart, Piece, Prose, Step, Stepwise

ARGUMENTS: Final = ("arguments", "parameters")
HEAD_CHARS: Final = 4096  # of an object, within which its name and its first brace are looked for
_BEGIN = re.compile(r'\s*(?:\{\s*(?:["}]|$)|$)')  # of an object
_BEFORE_KEY = re.compile(r"\s*(?:\{\s*)?")
_STRING = r'"(?:[^"\\]|\\.)*"'
_NAME = re.compile(rf'\s*\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*"name"\s*:\s*({_STRING})')
_ARGUMENTS = re.compile(rf'\s*,\s*"(?:{"|".join(ARGUMENTS)})"\s*:\s*(?=\{{)')


class ValueReader:
    """Finds the end of one JSON object or list, which the text begins with."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False

    def feed(self, text: str, start: int = 0) -> int:
        """The index after the part that belongs to the value. Sets `done` at its end."""
        for place in range(start, len(text)):
            if self._take(text[place]):
                self.done = True
                return place + 1
        return len(text)

    def _take(self, char: str) -> bool:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class CallReader:
    """Reads one object. Ends as `done` or as `failed`, which means it was no call; `raw` is its
    text.

    Arguments come as the model writes them if the name is before them, as in every template known;
    else at the object's end. If `names` are given, only an object that names one of them is a call.
    """

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        self._index = index
        self._names = names
        self._object = ValueReader()
        self._arguments = ValueReader()
        self.raw = ""
        self.started = False
        self.done = False
        self.failed = False

    def feed(self, text: str) -> tuple[list[Piece], str]:
        """The pieces of `text`, and the rest of it after the object."""
        blank = 0 if self.raw.strip() else len(text) - len(text.lstrip())
        if len(self.raw) < HEAD_CHARS and not _BEGIN.match(seen := self.raw + text):
            self.failed, place = True, len(_BEFORE_KEY.match(seen)[0])  # type: ignore[index]
            self.raw, rest = seen[:place], seen[place:]
            return [], rest
        end = self._object.feed(text, blank)
        new, rest = text[:end], text[end:]
        self.raw += new
        pieces = self._argued(new) if self.started else self._begun()
        if self._object.done and not self.failed:
            pieces += [] if self.started else self._whole()
            self.done = not self.failed
        return pieces, rest

    def _begun(self) -> list[Piece]:
        """The call's start, once its name and the brace of its arguments are known."""
        if (found := _NAME.match(self.raw[:HEAD_CHARS])) is None:
            return []
        name = json.loads(found[1], strict=False)
        if not self._is_known(name):
            self.failed = True
            return []
        if (before := _ARGUMENTS.match(self.raw, found.end())) is None:
            return []
        self.started = True
        return [CallStart(self._index, name), *self._argued(self.raw[before.end() :])]

    def _is_known(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._names if self._names else bool(name))

    def _argued(self, text: str) -> list[Piece]:
        said = "" if self._arguments.done else text[: self._arguments.feed(text)]
        return [CallArguments(self._index, said)] if said else []

    def _whole(self) -> list[Piece]:
        """The call in an object that has ended, whatever the order of its fields."""
        try:
            read = json.loads(self.raw, strict=False)
        except (ValueError, RecursionError):
            read = {}
        name = read.get("name")
        if not self._is_known(name):
            self.failed = True
            return []
        given: Any = next((read[key] for key in ARGUMENTS if key in read), {})
        written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        plain = written if written.lstrip()[:1] == "{" else "{}"
        return [CallStart(self._index, name), CallArguments(self._index, plain)]


class CallParser(Stepwise):
    """Base of parsers of answers with calls in them. A step is `_say` outside of calls, `_read` in
    a JSON object that may be one, and `_after` one that was."""

    _say: Step
    _after: Step

    def __init__(self) -> None:
        self._prose = Prose()
        self._step = self._say
        self._reader = CallReader(0)
        self._before = ""  # of the object: it is text too if that is no call
        self._num_calls = 0

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._step == self._say:
            pieces += self._prose.say(self._buffer)
        elif self._step == self._read and not self._reader.started:
            pieces += self._prose.say(self._before + self._reader.raw)
        return pieces + self._prose.finish()

    def _open(self, before: str, names: Collection[str] | None = None) -> None:
        """Reads an object from here on."""
        self._reader, self._before = CallReader(self._num_calls, names), before
        self._step = self._read

    def _read(self, pieces: list[Piece]) -> bool:
        reader = self._reader
        read, self._buffer = reader.feed(self._buffer)
        pieces += read
        if reader.failed:
            pieces += self._prose.say(self._before + reader.raw)
            self._step = self._say
        elif reader.done:
            self._end_call()
            self._step = self._after
        return reader.failed or reader.done

    def _end_call(self) -> None:
        self._prose.drop()
        self._num_calls += 1
