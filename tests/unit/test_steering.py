"""System messages in the middle of a chat, with chat templates as models have them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from api.tools.history import for_template
from api.tools.steering import steered
from api.tools.style import style_of
from engine.text.tokenizer import Tokenizer
from tests.support.models import bytes_tokenizer
from tests.support.templates import TEMPLATES

RULES = {"role": "system", "content": "Rules."}
ASK = {"role": "user", "content": "What?"}
REPLY = {"role": "assistant", "content": "That."}
STEER = {"role": "system", "content": "Now in French."}
SHOWN = "<system>\nNow in French.\n</system>"
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "20"}
Render = Callable[[Sequence[Mapping[str, Any]]], str]


def tokenizer_of(name: str) -> Tokenizer:
    tokenizer = bytes_tokenizer()
    tokenizer._base.chat_template = TEMPLATES[name]
    return Tokenizer(tokenizer._base)


def render_of(name: str) -> Render:
    tokenizer = tokenizer_of(name)
    style = style_of(TEMPLATES[name])

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        plain, _ = for_template(messages, (), TEMPLATES[name], style)
        return tokenizer.render(plain)

    return render


def placed(name: str, *messages: Mapping[str, Any]) -> list[Any]:
    return list(steered(messages, render_of(name)))


HOISTING = ("deepseek", "joined")


@pytest.mark.parametrize("name", ["smollm2", "chatml", "llama3", *HOISTING])
def test_a_template_that_renders_them_somewhere_is_left_alone(name):
    chat = [RULES, ASK, REPLY, STEER, ASK]
    assert chat == placed(name, *chat)


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("lead", [[RULES], []])
@pytest.mark.parametrize(
    "chat", [[ASK, REPLY], [ASK, REPLY, ASK, REPLY]], ids=["one turn", "two turns"]
)
def test_a_chat_without_one_is_left_alone(name, lead, chat):
    assert [*lead, *chat, ASK] == placed(name, *lead, *chat, ASK)


@pytest.mark.parametrize("name", ["gemma", "mistral", "strict", "silent"])
def test_one_that_would_be_lost_is_rendered_where_it_stands(name):
    chat = [RULES, ASK, REPLY, STEER, ASK]
    said = {"role": "user", "content": f"{SHOWN}\n\nWhat?"}
    assert [RULES, ASK, REPLY, said] == placed(name, *chat)
    assert SHOWN in render_of(name)(placed(name, *chat))


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {*HOISTING}))
@pytest.mark.parametrize(
    "chat",
    [
        [RULES, ASK, REPLY, STEER, ASK],
        [RULES, ASK, REPLY, STEER],
        [RULES, ASK, STEER],
        [ASK, REPLY, STEER, STEER, ASK],
        [RULES, ASK, REPLY, STEER, ASK, REPLY, STEER, ASK],
    ],
    ids=["user after", "last", "after a user", "two", "two turns"],
)
def test_no_other_template_changes_what_stands_before_it(name, chat):
    """What was rendered of the chat up to the message is the beginning of all later prompts."""
    render = render_of(name)
    first = next(n for n, each in enumerate(chat) if each is STEER)
    text = render(placed(name, *chat))
    before = render(placed(name, *chat[:first]))
    kept = before[: before.rindex(chat[first - 1]["content"]) + len(chat[first - 1]["content"])]
    assert text.startswith(kept)
    assert text.count("Now in French.") == chat.count(STEER)
    more = [*chat, REPLY, ASK] if chat[-1] is not REPLY else [*chat, ASK]
    shown = text[: text.rindex("Now in French.")]
    assert render(placed(name, *more)).startswith(shown)


def test_after_a_tools_result_it_is_a_turn_of_its_own():
    chat = [RULES, ASK, CALLED, RESULT, STEER]
    assert [*chat[:-1], {"role": "user", "content": SHOWN}] == placed("strict", *chat)
