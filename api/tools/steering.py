"""System messages in the middle of a chat, which steer it.

Most chat templates render one where it stands, or move its text to the start of the prompt. Those
that reject it or leave it out get it inside a user's turn, where it stands. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from engine.errors import RequestError

Plain = Mapping[str, Any]
Render = Callable[[Sequence[Plain]], str]
FORM: Final = "<system>\n{text}\n</system>"  # of a later system message inside a user's turn
_JOIN: Final = "\n\n"
_STEER = "f3d29c84"  # the text of a probe
_CALL: Final = {
    "id": "abcdefghi",  # nine characters, as some templates require
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
}


def steered(messages: Sequence[Plain], render: Render) -> Sequence[Plain]:
    """The messages with later system messages inside the turns of users, if the template rejects
    or leaves out one of them. `render` raises RequestError for messages that it rejects."""
    first = sum(1 for _ in takewhile(_is_system, messages))
    shapes = {_shape(messages, n) for n in range(first, len(messages)) if _is_system(messages[n])}
    lost = any(_is_lost(shape, render) for shape in shapes)
    return _in_place(messages, first) if lost else messages


def _is_system(message: Plain) -> bool:
    return bool(message["role"] == "system")


def _shape(messages: Sequence[Plain], number: int) -> tuple[bool, str]:
    """What may decide a template about a system message: whether the chat begins with one, and the
    role before it. What comes after does not count, so that later turns change nothing."""
    before = (each["role"] for each in reversed(messages[:number]) if not _is_system(each))
    return _is_system(messages[0]), next(before)


def _is_lost(shape: tuple[bool, str], render: Render) -> bool:
    """Whether the template loses a system message in short chats of this shape."""
    leads, before = shape
    chat = [_said("system", "be brief")] if leads else []
    chat.append(_said("user", "hi"))
    if before == "assistant":
        chat.append(_said("assistant", "yes"))
    elif before == "tool":
        chat.append({"role": "assistant", "content": "", "tool_calls": [_CALL]})
        chat.append(_said("tool", "20") | {"name": "f", "tool_call_id": _CALL["id"]})
    answer = _said("user" if before == "assistant" else "assistant", "yes")
    return any(_loses(chat, rest, render) for rest in ([], [answer]))


def _loses(chat: list[dict[str, Any]], rest: list[dict[str, Any]], render: Render) -> bool:
    """Whether a system message between `chat` and `rest` is rejected or left out.

    A template that rejects the chat without the message too decides nothing here.
    """
    try:
        render([*chat, *rest])
    except RequestError:
        return False
    try:
        return _STEER not in render([*chat, _said("system", _STEER), *rest])
    except RequestError:
        return True


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
