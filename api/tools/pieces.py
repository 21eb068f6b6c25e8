"""The pieces of a model's text, and the common parts of the parsers.

A parser returns the same pieces however the text is split, except that one text may come in two
pieces. Text that may be the beginning of a marker is held back until that is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """The model's reasoning before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a call of tool `name`, number `index` in the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text as the model writes it."""

    index: int
    text: str


Piece = Text | Thought | CallStart | CallArguments
Step = Callable[[list[Piece]], bool]  # adds pieces; returns False if it needs more text


class Parser(Protocol):
    """Cuts one answer into pieces. `finish` is called once, at the end of the answer."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


class Stepwise:
    """Base of parsers that read an answer in steps."""

    _buffer = ""  # text not yet read by a step
    _step: Step

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces


class Plain:
    """Treats the whole answer as text."""

    def feed(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class Prose:
    """Text that holds back trailing white space and drops it before a call."""

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
        """A call follows: drops the white space before and after it."""
        self._held, self._skip = "", True

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        return [self._kind(held)] if held else []


def cut(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """The text before the first marker, the marker, and the rest.

    Without a marker: the text that is surely none, None, and the text that may be the beginning of
    one.
    """
    found = [(text.find(marker), marker) for marker in markers if marker in text]
    if found:
        place, marker = min(found)
        return text[:place], marker, text[place + len(marker) :]
    keep = max(overlap(text, marker) for marker in markers)
    return text[: len(text) - keep], None, text[len(text) - keep :]


def overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` at the end of `text`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
