"""Grammars: what is refused by name, what is matched, and the bounds on time."""

import random
import re
import time
from typing import Any

import pytest

from engine.errors import InvalidParameter, StructureUnavailable
from engine.grammar.compiler import GrammarCompiler
from engine.structure import MAX_DEPTH, MAX_SOURCE_BYTES, StructuredOutputs, source_of
from tests.support.walks import accepts, ids, walk

WORDS = ["name", '{"', '": ', "full", "person ", ": 1", "a", "日本"]
TOKENS = [*(bytes([byte]) for byte in range(256)), b"", *(word.encode() for word in WORDS)]
END = 256


def greedy(text: str) -> list[int]:
    data, spelt = text.encode(), []
    while data:
        fits = [t for t in range(len(TOKENS)) if TOKENS[t] and data.startswith(TOKENS[t])]
        spelt.append(max(fits, key=lambda t: len(TOKENS[t])))
        data = data[len(TOKENS[spelt[-1]]) :]
    return spelt


@pytest.fixture
def compiler():
    made = GrammarCompiler(lambda: TOKENS, frozenset({END}), greedy)
    yield made
    made.close()


def many(number: int) -> dict[str, Any]:
    return {f"p{i}": {"type": "string"} for i in range(number)}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"not": {}}}}, "#/properties/a/not"),
        ({"items": {"uniqueItems": True}}, "#/items/uniqueItems"),
        ({"contains": {}}, "#/contains"),
        ({"if": {}, "then": {}}, "#/if"),
        ({"dependentRequired": {}}, "#/dependentRequired"),
        ({"propertyNames": {}}, "#/propertyNames"),
        ({"unevaluatedProperties": False}, "#/unevaluatedProperties"),
        ({"allOf": [{}, {"madeUp": 1}]}, "#/allOf/1/madeUp"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"nullable": True}}}, "#/$defs/a/nullable"),
        ({"x-guidance": {"lenient": True}}, "#/x-guidance"),
        ({"properties": {"a/b": {"format": "int32"}}}, "#/properties/a~1b/format"),
        ({"type": "strin"}, "#/type"),
        ({"items": [{}]}, "#/items"),
        ({"$ref": "http://elsewhere/x"}, "#/$ref"),
        ({"$ref": "#/$defs/none"}, "#/$ref"),
        ({"minLength": -1}, "#/minLength"),
        ({"minimum": "3"}, "#/minimum"),
        ({"const": 2**60}, "#/const"),
        ({"pattern": "[a&&b]"}, "#/pattern"),
        ({"pattern": "a" * 5000}, "#/pattern"),
        ({"multipleOf": 99999989}, "#/multipleOf"),
        ({"additionalProperties": {}, "minProperties": 2}, "#/minProperties"),
        ({"properties": many(100), "maxProperties": 2}, "#/properties"),
        ({"properties": many(1200)}, "#/properties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
        ({"patternProperties": {"a": {}, "b": {}}}, "#/patternProperties"),
    ],
)
def test_what_is_not_enforced_is_refused_with_its_place(compiler, schema, place):
    with pytest.raises(InvalidParameter) as refused:
        compiler.compile(source_of(StructuredOutputs(json=schema), "field"))
    assert "field" == refused.value.param
    assert f"field at {place}: " in str(refused.value)


CJK = {"type": "object", "properties": {"名前": {"type": "boolean"}, "住所": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("asked", "matches", "others"),
    [
        ({"json": {"enum": ["日本", "中国", 3]}}, ['"日本"', '"中国"', "3"], ['"日"', "日本"]),
        ({"json": {"enum": ["日本", "東"], "type": "null"}}, None, []),
        ({"json": {"enum": ["a", 1], "type": "string"}}, ['"a"'], ["1"]),
        ({"regex": "(東京|大阪)"}, ["東京", "大阪"], ["東", "東大阪"]),
        ({"choice": ["😀", "a", "ab"]}, ["😀", "a", "ab"], ["b", ""]),
        ({"json": CJK}, ["{}", '{"名前": true}', '{"住所": 1}'], ['{"他": 1}', '{"住所": "1"}']),
        ({"json": {"type": "string", "format": "ipv4"}}, ['"52.0.2.82"'], ['"52.0.2.082"']),
        (
            {"json": {"type": "string", "format": "date"}},
            ['"2024-02-29"', '"2000-02-29"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-04-31"'],
        ),
        ({"json": {"pattern": "a", "maxLength": 2, "type": "string"}}, ['"xa"'], ['"xax"', '"x"']),
        (
            {"json": {"allOf": [{"type": "object", "required": ["a"]}, {"maxProperties": 1}]}},
            ['{"a": 1}'],
            ["false", "{}"],
        ),
        ({"json": {"type": "object", "required": ["x"]}}, ['{"x": null}'], ["{}"]),
        ({"json": {"$ref": "#"}}, None, []),
        ({"json": "false"}, None, []),
        ({"regex": r"\d{3}-x/y"}, ["123-x/y"], ["12-x/y"]),
        ({"regex": "(abc"}, None, []),
        ({"grammar": 'root ::= a "x"\na ::= [a-z]+'}, ["abx", "xx"], ["ab"]),
        ({"grammar": 'root ::= "[" (root ("," root)*)? "]" | [0-9]'}, ["[1,[2],3]"], ["[1"]),
        ({"grammar": r'root ::= [\x41-C^\]] "\u00e9"'}, ["Aé", "]é", "^é"], ["Dé"]),
        ({"grammar": "root ::= none"}, None, []),
        ({"grammar": "root ::= ("}, None, []),
        ({"grammar": 'start: "a"'}, None, []),
    ],
)
def test_a_grammar_matches_its_answers_alone(compiler, asked, matches, others):
    """`matches` is None for a grammar that is refused."""
    if matches is None:
        with pytest.raises(InvalidParameter, match="structured_outputs"):
            compiler.compile(source_of(StructuredOutputs(**asked)))
        return
    grammar = compiler.compile(source_of(StructuredOutputs(**asked)))
    for text in matches:
        assert spelt(grammar.begin(0), text), text
    for text in others:
        assert not spelt(grammar.begin(0), text), text


def spelt(state: Any, text: str) -> bool:
    """Whether the text is an answer, in single bytes or in the tokens that are forced."""
    data = text.encode()
    while data:
        token = state.forced[0] if state.forced else data[0]
        if not data.startswith(TOKENS[token]) or token == END or token not in ids(state.allowed):
            return False
        data = data[len(TOKENS[token]) :]
        state.accept(token)
        assert state.wait(10.0) and state.stuck is None
    return END in ids(state.allowed)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "nothing"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"json": "{"}, "no JSON"),
        ({"json": 3}, "an object"),
        ({"json": {"items": {"enum": ["a" * MAX_SOURCE_BYTES]}}}, "longer than"),
        ({"regex": ""}, "not empty"),
        ({"choice": []}, "list of strings"),
        ({"choice": ["a", 1]}, "list of strings"),
        ({"regex": "a" * (MAX_SOURCE_BYTES + 1)}, "longer than"),
    ],
)
def test_what_is_asked_for_is_checked(asked, said):
    with pytest.raises(InvalidParameter, match=said):
        source_of(StructuredOutputs(**asked))


def test_a_schema_nested_too_deep_is_refused():
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        schema = {"items": schema}
    with pytest.raises(InvalidParameter, match="deeper"):
        source_of(StructuredOutputs(json=schema))


HOSTILE = {
    "a long chain": {"regex": "ab" * 2000},
    "an endless repetition": {"regex": "a{1000000000}"},
    "nested repetitions": {"regex": "((a{1000}){1000}){1000}"},
    "optional characters": {"regex": "a?" * 2000},
    "an exponential automaton": {"regex": "(.|\n)*a.{60}"},
    "deep parentheses": {"regex": "(" * 2000 + "a" + ")" * 2000},
    "a huge enum": {"json": {"enum": [f"word{i}" for i in range(4500)]}},
    "references": {
        "json": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
            | {"d40": {}},
        }
    },
    "a product of alternatives": {
        "json": {
            "allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in "abcd"]} for i in "123456789"]
        }
    },
    "a huge array": {"json": {"type": "array", "minItems": 1000000}},
    "doubling rules": {
        "grammar": "root ::= a0\n"
        + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(30))
        + "\na30 ::= [^x]?"
    },
    "common beginnings": {
        "grammar": "root ::= "
        + " | ".join(f"r{i}" for i in range(90))
        + "\n"
        + "\n".join(f'r{i} ::= "a" root "b{i}"' for i in range(90))
    },
}


@pytest.mark.parametrize("asked", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_grammar_takes_bounded_time(compiler, asked, monkeypatch):
    """Refused, ended, or served; never more than a second for a step."""
    monkeypatch.setattr(compiler, "_encode", lambda text: list(text.encode()))
    began_s = time.thread_time()
    try:
        state = compiler.compile(source_of(StructuredOutputs(**asked))).begin(0)
    except InvalidParameter:
        return
    finally:
        assert time.thread_time() - began_s < 3.0
    chance = random.Random(0)
    for _ in range(200):
        if not state.wait(5.0) or state.stuck is not None:
            break
        token = chance.choice(ids(state.allowed))
        if token == END:
            break
        state.accept(token)
    assert state.wait(5.0)


def test_forced_text_is_the_tokenizers_and_a_longer_token_stays_open(compiler):
    state = compiler.compile(source_of(StructuredOutputs(choice=["name: 1", "name: 2"]))).begin(0)
    assert [b"name"] == [TOKENS[token] for token in state.forced]
    state.accept(state.forced[0])
    assert {b":", b": 1"} == {TOKENS[token] for token in ids(state.allowed)}
    text = b"person " * 300
    state = compiler.compile(source_of(StructuredOutputs(choice=[text.decode()]))).begin(0)
    answer, num_forced = walk(state, TOKENS, random.Random(0), limit=2000)
    assert (text, 301) == (answer, num_forced)


def test_the_end_waits_for_min_tokens_where_the_grammar_can_go_on(compiler):
    state = compiler.compile(source_of(StructuredOutputs(regex="[ab]+"))).begin(3)
    for _ in range(3):
        assert END not in ids(state.allowed)
        state.accept(ord("b"))
    assert END in ids(state.allowed)


def test_a_slow_state_is_matched_on_another_thread(compiler, monkeypatch):
    monkeypatch.setattr("engine.grammar.state.QUICK_S", 0.0)
    state = compiler.compile(source_of(StructuredOutputs(regex="[ab]{2}c"))).begin(0)
    assert accepts(state, b"abc")
    monkeypatch.setattr("engine.grammar.state.MATCH_SLACK_S", -1.0)
    state = compiler.compile(source_of(StructuredOutputs(regex="[ab]{20}"))).begin(0)
    assert state.stuck is not None and re.search("too ambiguous: matching 0 tokens", state.stuck)


def test_a_missing_package_or_end_is_named(compiler, monkeypatch):
    source = source_of(StructuredOutputs(regex="a"))
    endless = GrammarCompiler(lambda: TOKENS, frozenset(), greedy)
    with pytest.raises(InvalidParameter, match="no end-of-sequence token"):
        endless.compile(source)
    endless.close()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StructureUnavailable, match=r"cachesvc\[structured\]"):
        compiler.compile(source)
