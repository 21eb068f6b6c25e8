"""The pieces that a model's text is cut into, and what the parsers share.

A parser takes text in any split and gives the same pieces, but for where one text was cut in two.
Text that looks like the beginning of a marker is held back until it is known to be one or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """What the model says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What it thinks before."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the tool `name`, the answer's number `index`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON as the model writes it."""

    index: int
    text: str


Piece = Text | Thought | CallStart | CallArguments
Step = Callable[[list[Piece]], bool]  # of a parser: adds pieces; False where it needs more text


class Parser(Protocol):
    """Cuts one answer into pieces. `finish` is called once, at the answer's end."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


class Stepwise:
    """What parsers share that go through an answer in steps."""

    _buffer = ""  # text that no step has used
    _step: Step

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces


class Plain:
    """All of it is text."""

    def feed(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class Prose:
    """Text whose white space at its end waits: before a call it is dropped."""

    def __init__(self, kind: type[Text] | type[Thought] = Text, *, skip_leading: bool = False):
        self._kind = kind
        self._skip = skip_leading
        self._held = ""

    def say(self, text: str) -> list[Piece]:
        if self._skip:
            text = text.lstrip()
            self._skip = not text
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return [self._kind(shown)] if shown else []

    def drop(self) -> None:
        """A call follows: the white space before it, and after it, is no text."""
        self._held, self._skip = "", True

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        return [self._kind(held)] if held else []


def cut(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """The text before the first marker, the marker, the rest; without one, what is surely no
    marker's beginning, None, and what may be."""
    found = [(text.find(marker), marker) for marker in markers if marker in text]
    if found:
        place, marker = min(found)
        return text[:place], marker, text[place + len(marker) :]
    keep = max(overlap(text, marker) for marker in markers)
    return text[: len(text) - keep], None, text[len(text) - keep :]


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with, short of all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
