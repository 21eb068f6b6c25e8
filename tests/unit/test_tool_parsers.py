"""Each style's text becomes the same pieces however the stream is cut."""

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
PUT = '{"arguments": {}, "name": "put"}'
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


TICK = '{"a": "`"}'


def call(text):
    return f"<tool_call>{text}</tool_call>"


def fenced(name, arguments):
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


# By parser: a text, what is said of it, and the calls; texts alone are said as they are.
OF_CALLS = {
    HermesParser: [
        "just text, 1 < 2 <tool",
        "ends in space \n",
        (
            f"Let me see.\n\n<tool_call>\n{GET}\n</tool_call>",
            "Let me see.",
            [("get", GET_ARGUMENTS)],
        ),
        (f"{call(GET)}\n{call(PUT)}\ndone", "done", [("get", GET_ARGUMENTS), ("put", "{}")]),
        (call('{"name": "get"}'), "", [("get", "{}")]),
        (call('{"name": "get", "arguments": "{\\"a\\": 1}"}'), "", [("get", '{"a": 1}')]),
        call("no json") + "!",
        call('{"nome": 1.5, "b": true}'),
        (
            call('{"arguments": {"b": [1.5, "é"]}, "name": "get", "id": 3}'),
            "",
            [("get", '{"b": [1.5, "é"]}')],
        ),
        (
            '<tool_call>{"type": "function", "name": "get", "arguments": {"a": 1',
            "",
            [("get", '{"a": 1')],
        ),
        '<tool_call>{"name": "g',
        ('<tool_call>{"name": "get", "arguments": {"a": "unfin', "", [("get", '{"a": "unfin')]),
    ],
    json_parser: [
        (
            '{"name": "get", "parameters": {"a": 1}}; {"name": "put", "parameters": {}}',
            "",
            [("get", '{"a": 1}'), ("put", "{}")],
        ),
        (
            '\n<|python_tag|>{"type": "function", "name": "get", "parameters": {"a": 1}}',
            "",
            [("get", '{"a": 1}')],
        ),
        '{"name": "Paris", "parameters": 3}',
        '  {"city": "Paris"} is it',
        "I say {} and [] here ",
        '{"name": "get", "par',
        (
            'Well.\n<|python_tag|>{"name": "put", "parameters": {"k": "v"}}',
            "Well.",
            [("put", '{"k": "v"}')],
        ),
    ],
    MistralParser: [
        "text [TOOL] [",
        (
            f'Yes. [TOOL_CALLS] [{GET}, {{"name": "put", "arguments": {{}}}}]',
            "Yes.",
            [("get", GET_ARGUMENTS), ("put", "{}")],
        ),
        (
            '[TOOL_CALLS]get[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]put[CALL_ID]x1[ARGS]{}',
            "",
            [("get", '{"a": {"b": "}"}}'), ("put", "{}")],
        ),
        ('[TOOL_CALLS]get{"a": 1}', "", [("get", '{"a": 1}')]),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS]nothing", []),
    ],
    DeepSeekParser: [
        (
            f"Hm.\n{CALLS}{fenced('get', TICK)}\n{fenced('put', '{}')}{CALLS_END}",
            "Hm.",
            [("get", TICK), ("put", "{}")],
        ),
        (
            f'{CALLS}{CALL}get{SEP}{{"a": 1}}{CALL_END}{CALL}put{SEP}{{}}{CALL_END}{CALLS_END}',
            "",
            [("get", '{"a": 1}'), ("put", "{}")],
        ),
        "plain <｜tool",
        (f'{CALLS}{CALL}get{SEP}{{"a": 1', "", [("get", '{"a": 1')]),
    ],
    HarmonyParser: [
        (
            ' to=functions.put<|channel|>commentary json<|message|>{"k": "<"}',
            "",
            [("put", '{"k": "<"}')],
        ),
        "no channel at all",
    ],
    thinking: ["\n no thinking"],
}
ANALYSIS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>"
CALLING = 'commentary to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>'
THOUGHT = f"<think>\nI think <b> so.\n\n</think>\n\nSure.{call(GET)}"
CASES = [
    *(
        (parser, each, ("", each, []))
        if isinstance(each, str)
        else (parser, each[0], ("", *each[1:]))
        for parser, cases in OF_CALLS.items()
        for each in cases
    ),
    (HarmonyParser, ANALYSIS.format("Hm, ok.") + "final<|message|>Yes. ", ("Hm, ok.", "Yes. ", [])),
    (HarmonyParser, ANALYSIS.format("Use it.") + CALLING, ("Use it.", "", [("get", '{"a": 1}')])),
    (thinking, THOUGHT, ("I think <b> so.", "Sure.", [("get", GET_ARGUMENTS)])),
    (thinking, "<think>for ever", ("for ever", "", [])),
    (thinking_already, "so\nit is\n</think>\nYes.", ("so\nit is", "Yes.", [])),
]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_what_a_text_is_made_of_also_a_character_at_a_time(parser, text, expected):
    assert expected == made(parser(), [text]) == made(parser(), list(text))


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
    for parser in OF_CALLS:
        assert made(parser(), ["".join(parts)]) == made(parser(), parts)
