"""System messages in the middle of a chat, which steer it, and the place a template gives them.

Some chat templates move every system message to the start of the prompt. A later one then changes
the tokens before it, so the whole conversation misses. Other templates reject or ignore it. In
these cases it is rendered where it stands, inside a user's turn. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any, Final

from engine.errors import RequestError

Plain = Mapping[str, Any]
Render = Callable[[Sequence[Plain]], str]
FORM: Final = "<system>\n{text}\n</system>"  # of a later system message inside a user's turn
_JOIN: Final = "\n\n"
_BEFORE, _STEER = "a0c5b7e1", "f3d29c84"  # texts of a probe
_CALL: Final = {
    "id": "abcdefghi",  # nine characters, as some templates require
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
}


class Placement(StrEnum):
    """What a template does with a system message after the first turn, the worst first."""

    LOST = "lost"  # it is rejected or left out
    HOISTED = "hoisted"  # it changes what is rendered before it
    STANDS = "stands"  # it is rendered where it is


def steered(messages: Sequence[Plain], render: Render, *, hoisted: bool) -> Sequence[Plain]:
    """The messages with later system messages inside the turns of users, where that is needed.

    It is needed for a template that rejects or leaves out one of them, and with `hoisted` also for
    a template that moves one. `render` raises RequestError for messages that it rejects.
    """
    first = sum(1 for _ in takewhile(_is_system, messages))
    later = [n for n in range(first, len(messages)) if _is_system(messages[n])]
    if not later:
        return messages
    needing = {Placement.LOST, Placement.HOISTED} if hoisted else {Placement.LOST}
    if any(_placement(shape, render) in needing for shape in {_shape(messages, n) for n in later}):
        return _in_place(messages, first)
    return messages


def _is_system(message: Plain) -> bool:
    return bool(message["role"] == "system")


def _shape(messages: Sequence[Plain], number: int) -> tuple[bool, str]:
    """What may decide a template about a system message: whether the chat begins with one, and the
    role before it. What comes after does not count, so that later turns change nothing."""
    before = (each["role"] for each in reversed(messages[:number]) if not _is_system(each))
    return _is_system(messages[0]), next(before)


def _placement(shape: tuple[bool, str], render: Render) -> Placement:
    """What the template does with short chats of this shape."""
    leads, before = shape
    chat = [_said("system", "be brief")] if leads else []
    chat.append(_said("user", "hi" if before in ("assistant", "tool") else _BEFORE))
    if before == "assistant":
        chat.append(_said("assistant", _BEFORE))
    elif before == "tool":
        chat.append({"role": "assistant", "content": "", "tool_calls": [_CALL]})
        chat.append(_said("tool", _BEFORE) | {"name": "f", "tool_call_id": _CALL["id"]})
    answer = _said("user" if before == "assistant" else "assistant", "yes")
    placements = {_placement_of(chat, rest, render) for rest in ([], [answer])}
    return next(placement for placement in Placement if placement in placements)


def _placement_of(
    chat: list[dict[str, Any]], rest: list[dict[str, Any]], render: Render
) -> Placement:
    """What becomes of a system message between `chat` and `rest`.

    A template that rejects the chat without the message too decides nothing here.
    """
    try:
        plain = render([*chat, *rest])
    except RequestError:
        return Placement.STANDS
    try:
        text = render([*chat, _said("system", _STEER), *rest])
    except RequestError:
        return Placement.LOST
    if _STEER not in text:
        return Placement.LOST
    opening = plain[: plain.find(_BEFORE) + len(_BEFORE)]
    return Placement.STANDS if text.partition(_STEER)[0].startswith(opening) else Placement.HOISTED


def _in_place(messages: Sequence[Plain], first: int) -> list[Plain]:
    """Each system message from `first` on in the user's turn after it, else in the one before it,
    else in a turn of its own. Later turns do not change the choice."""
    placed = list(messages[:first])
    steering = list[str]()
    for message in messages[first:]:
        if _is_system(message):
            steering.append(FORM.format(text=message["content"]))
        elif message["role"] == "user":
            placed.append(_with(message, _JOIN.join(steering), ahead=True))
            steering = []
        else:
            placed = _ended(placed, steering)
            placed.append(message)
            steering = []
    return _ended(placed, steering)


def _ended(placed: list[Plain], steering: Sequence[str]) -> list[Plain]:
    """The messages with `steering` at their end, which no user's turn follows."""
    if not steering:
        return placed
    text = _JOIN.join(steering)
    if placed and placed[-1]["role"] == "user":
        return [*placed[:-1], _with(placed[-1], text, ahead=False)]
    return [*placed, _said("user", text)]


def _with(message: Plain, text: str, *, ahead: bool) -> Plain:
    """A user's message with `text` before or after its own."""
    if not text:
        return message
    content = message["content"]
    return {**message, "content": _JOIN.join((text, content) if ahead else (content, text))}


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}
