"""Each style's text becomes the same pieces however the stream is cut."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.tools.deepseek import DeepSeekParser
from api.tools.harmony import HarmonyParser
from api.tools.hermes import HermesParser
from api.tools.json_list import JsonParser
from api.tools.mistral import MistralParser
from api.tools.pieces import CallArguments, CallStart, Parser, Plain, Text, Thought
from api.tools.reasoning import ThinkParser

Made = tuple[str, str, list[tuple[str, str]]]
NAMES = frozenset({"get", "put"})
GET = '{"name": "get", "arguments": {"a": "x}\\"{", "b": [1, {"c": null}]}}'
GET_ARGUMENTS = '{"a": "x}\\"{", "b": [1, {"c": null}]}'


def made(parser: Parser, texts: list[str]) -> Made:
    """The reasoning, the text and the calls of an answer that comes in `texts`."""
    thoughts, said, calls = "", "", list[tuple[str, str]]()
    for piece in [p for text in texts for p in parser.feed(text)] + parser.finish():
        match piece:
            case Text(text):
                said += text
            case Thought(text):
                thoughts += text
            case CallStart(index, name):
                assert len(calls) == index
                calls.append((name, ""))
            case CallArguments(index, text):
                assert len(calls) == index + 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return thoughts, said, calls


def json_parser() -> Parser:
    return JsonParser(NAMES)


def thinking() -> Parser:
    return ThinkParser(HermesParser(), opened=False)


def thinking_already() -> Parser:
    return ThinkParser(Plain(), opened=True)


CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

CASES: list[tuple[Callable[[], Parser], str, Made]] = [
    (HermesParser, "just text, 1 < 2 <tool", ("", "just text, 1 < 2 <tool", [])),
    (HermesParser, "ends in space \n", ("", "ends in space \n", [])),
    (
        HermesParser,
        f"Let me see.\n\n<tool_call>\n{GET}\n</tool_call>",
        ("", "Let me see.", [("get", GET_ARGUMENTS)]),
    ),
    (
        HermesParser,
        (
            f'<tool_call>{GET}</tool_call>\n<tool_call>{{"arguments": {{}}, "name": "put"}}'
            "</tool_call>\ndone"
        ),
        ("", "done", [("get", GET_ARGUMENTS), ("put", "{}")]),
    ),
    (HermesParser, '<tool_call>{"name": "get"}</tool_call>', ("", "", [("get", "{}")])),
    (
        HermesParser,
        '<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("get", '{"a": 1}')]),
    ),
    (HermesParser, "<tool_call>no json</tool_call>!", ("", "<tool_call>no json</tool_call>!", [])),
    (
        HermesParser,
        '<tool_call>{"nome": 1.5, "b": true}</tool_call>',
        ("", '<tool_call>{"nome": 1.5, "b": true}</tool_call>', []),
    ),
    (
        HermesParser,
        '<tool_call>{"arguments": {"b": [1.5, "é"]}, "name": "get", "id": 3}</tool_call>',
        ("", "", [("get", '{"b": [1.5, "é"]}')]),
    ),
    (
        HermesParser,
        '<tool_call>{"type": "function", "name": "get", "arguments": {"a": 1',
        ("", "", [("get", '{"a": 1')]),
    ),
    (HermesParser, '<tool_call>{"name": "g', ("", '<tool_call>{"name": "g', [])),
    (
        HermesParser,
        '<tool_call>{"name": "get", "arguments": {"a": "unfin',
        ("", "", [("get", '{"a": "unfin')]),
    ),
    (
        json_parser,
        '{"name": "get", "parameters": {"a": 1}}; {"name": "put", "parameters": {}}',
        ("", "", [("get", '{"a": 1}'), ("put", "{}")]),
    ),
    (
        json_parser,
        '\n<|python_tag|>{"type": "function", "name": "get", "parameters": {"a": 1}}',
        ("", "", [("get", '{"a": 1}')]),
    ),
    (
        json_parser,
        '{"name": "Paris", "parameters": 3}',
        ("", '{"name": "Paris", "parameters": 3}', []),
    ),
    (json_parser, '  {"city": "Paris"} is it', ("", '  {"city": "Paris"} is it', [])),
    (json_parser, "I say {} and [] here ", ("", "I say {} and [] here ", [])),
    (json_parser, '{"name": "get", "par', ("", '{"name": "get", "par', [])),
    (
        json_parser,
        'Well.\n<|python_tag|>{"name": "put", "parameters": {"k": "v"}}',
        ("", "Well.", [("put", '{"k": "v"}')]),
    ),
    (MistralParser, "text [TOOL] [", ("", "text [TOOL] [", [])),
    (
        MistralParser,
        f'Yes. [TOOL_CALLS] [{GET}, {{"name": "put", "arguments": {{}}}}]',
        ("", "Yes.", [("get", GET_ARGUMENTS), ("put", "{}")]),
    ),
    (
        MistralParser,
        '[TOOL_CALLS]get[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]put[CALL_ID]x1[ARGS]{}',
        ("", "", [("get", '{"a": {"b": "}"}}'), ("put", "{}")]),
    ),
    (MistralParser, '[TOOL_CALLS]get{"a": 1}', ("", "", [("get", '{"a": 1}')])),
    (MistralParser, "[TOOL_CALLS] nothing", ("", "[TOOL_CALLS]nothing", [])),
    (
        DeepSeekParser,
        (
            f'Hm.\n{CALLS}{CALL}function{SEP}get\n```json\n{{"a": "`"}}\n```{CALL_END}\n'
            f"{CALL}function{SEP}put\n```json\n{{}}\n```{CALL_END}{CALLS_END}"
        ),
        ("", "Hm.", [("get", '{"a": "`"}'), ("put", "{}")]),
    ),
    (
        DeepSeekParser,
        f'{CALLS}{CALL}get{SEP}{{"a": 1}}{CALL_END}{CALL}put{SEP}{{}}{CALL_END}{CALLS_END}',
        ("", "", [("get", '{"a": 1}'), ("put", "{}")]),
    ),
    (DeepSeekParser, "plain <｜tool", ("", "plain <｜tool", [])),
    (DeepSeekParser, f'{CALLS}{CALL}get{SEP}{{"a": 1', ("", "", [("get", '{"a": 1')])),
    (
        HarmonyParser,
        (
            "<|channel|>analysis<|message|>Hm, ok.<|end|><|start|>assistant<|channel|>final"
            "<|message|>Yes. "
        ),
        ("Hm, ok.", "Yes. ", []),
    ),
    (
        HarmonyParser,
        (
            "<|channel|>analysis<|message|>Use it.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>'
        ),
        ("Use it.", "", [("get", '{"a": 1}')]),
    ),
    (
        HarmonyParser,
        ' to=functions.put<|channel|>commentary json<|message|>{"k": "<"}',
        ("", "", [("put", '{"k": "<"}')]),
    ),
    (HarmonyParser, "no channel at all", ("", "no channel at all", [])),
    (
        thinking,
        f"<think>\nI think <b> so.\n\n</think>\n\nSure.<tool_call>{GET}</tool_call>",
        ("I think <b> so.", "Sure.", [("get", GET_ARGUMENTS)]),
    ),
    (thinking, "\n no thinking", ("", "\n no thinking", [])),
    (thinking, "<think>for ever", ("for ever", "", [])),
    (thinking_already, "so\nit is\n</think>\nYes.", ("so\nit is", "Yes.", [])),
]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_what_a_text_is_made_of(parser, text, expected):
    assert expected == made(parser(), [text])


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_one_character_at_a_time_is_the_same(parser, text, expected):
    assert expected == made(parser(), list(text))


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_split_is_the_same(data):
    parser, text, _ = data.draw(st.sampled_from(CASES))
    twice = text + data.draw(st.sampled_from(["", text, " x", "<", '{"name"']))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(twice)), max_size=12)))
    parts = [twice[a:b] for a, b in zip([0, *cuts], [*cuts, len(twice)], strict=True)]
    assert made(parser(), [twice]) == made(parser(), parts)


def test_harmony_s_call_is_text_where_none_may_be_made():
    call = "<|channel|>commentary to=functions.weather<|message|>{}<|call|>"
    assert ("", "{}", []) == made(HarmonyParser(may_call=False), [call])


@given(st.lists(st.sampled_from([*list('{}[]":, <>\\na1|'), "<tool_call>", "</think>", CALL, SEP])))
@settings(max_examples=300, deadline=None)
def test_no_text_is_lost_or_raises(parts):
    for parser in (
        HermesParser,
        json_parser,
        MistralParser,
        DeepSeekParser,
        HarmonyParser,
        thinking,
    ):
        assert made(parser(), ["".join(parts)]) == made(parser(), parts)
