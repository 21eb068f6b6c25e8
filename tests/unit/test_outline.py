"""Roles and sizes of messages are read from token ids, under templates of several styles."""

import pytest

from engine.text.outline import Outline
from engine.text.tokenizer import Tokenizer
from tests.support.models import _bytes_tokenizer, bytes_tokenizer

LOOP = "{% for m in messages %}"
TEMPLATES = {
    "chatml": LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "headers": LOOP + "<h>{{ m.role }}</h>\n\n{{ m.content }}<eot>{% endfor %}",
    "turns": LOOP
    + "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + "<h>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}</h>\n{% endfor %}",
    "brackets": LOOP
    + "{% if m.role == 'user' %}<inst> {{ m.content }} </inst>"
    + "{% else %} {{ m.content }}<eot>{% endif %}{% endfor %}",
}
CHAT = [("user", "Who is that?"), ("assistant", "It is Ada."), ("user", "user\n<x> assistant\n")]


def tokenizer(template):
    base = _bytes_tokenizer(["<h>", "</h>", "<eot>", "<inst>", "</inst>"])
    base.chat_template = template
    return Tokenizer(base)


def ids_of(model, chat, **options):
    messages = [{"role": role, "content": content} for role, content in chat]
    return model.encode(model.render(messages, **options), add_special_tokens=False)


@pytest.mark.parametrize("style", TEMPLATES)
def test_messages_are_told_with_their_sizes(style):
    model = tokenizer(TEMPLATES[style])
    tokens = ids_of(model, CHAT, add_generation_prompt=False)
    told = Outline(model)(tokens)
    assert [role for role, _ in CHAT] == [role for role, _ in told[:3]]
    assert all(role == "assistant" for role, _ in told[3:])  # asked to answer
    assert len(tokens) == sum(size for _, size in told)
    first = ids_of(model, CHAT[:1], add_generation_prompt=False)
    assert abs(told[0][1] - len(first)) <= 7  # the assistant's mark may begin with the user's end


def test_system_and_tool_messages_have_their_roles():
    model = tokenizer(TEMPLATES["headers"])
    chat = [("system", "Be kind."), *CHAT[:2], ("tool", "42")]
    told = Outline(model)(ids_of(model, chat, add_generation_prompt=False))
    assert ["system", "user", "assistant", "tool"] == [role for role, _ in told]


def test_what_begins_within_a_message_has_no_role():
    model = bytes_tokenizer()
    tokens = ids_of(model, CHAT)
    told = Outline(model)(tokens[16:])
    assert ("", ["assistant", "user", "assistant"]) == (told[0][0], [role for role, _ in told[1:]])
    assert [] == Outline(model)([])


def test_a_template_without_special_tokens_tells_nothing():
    model = tokenizer(LOOP + "{{ m.role }}: {{ m.content }}\n{% endfor %}")
    tokens = ids_of(model, CHAT, add_generation_prompt=False)
    assert [("", len(tokens))] == Outline(model)(tokens)
