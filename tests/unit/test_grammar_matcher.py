"""What a matcher allows and forces, held against xgrammar's own matcher and against the texts."""

import json
import random
import re
import string
from typing import Any

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.grammar.matcher import VocabularyCompiler
from engine.grammar.state import MatcherState
from engine.grammar.vocabulary import Vocabulary
from engine.structure import (
    MAX_DEPTH,
    MAX_SOURCE_BYTES,
    SourceKind,
    StructuredOutputs,
    source_of,
)
from tests.support.grammars import LocalGrammar

EOS = 256
PIECES = [
    '{"',
    '": ',
    '", "',
    '"}',
    "na",
    "name",
    "person",
    "per",
    ": 1",
    ", ",
    "tr",
    "true",
    "é日",
]
TOKENS = [bytes([byte]) for byte in range(256)] + [b"", b""] + [piece.encode() for piece in PIECES]


def greedy(text: str) -> list[int]:
    """The longest token first, as a tokenizer would spell a text."""
    data, spelt = text.encode(), []
    while data:
        token = max(
            (t for t in range(len(TOKENS)) if TOKENS[t] and data.startswith(TOKENS[t])),
            key=lambda t: len(TOKENS[t]),
        )
        spelt.append(token)
        data = data[len(TOKENS[token]) :]
    return spelt


VOCABULARY = Vocabulary(TOKENS, [EOS], greedy)
COMPILER = VocabularyCompiler(VOCABULARY)


def grammar(**asked: Any) -> tuple[LocalGrammar, Any]:
    """The grammar as the server has it, and xgrammar's own."""
    made = LocalGrammar(COMPILER, source_of(StructuredOutputs(**asked)))
    return made, made.compiled


def ids(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(matcher: MatcherState, chance: random.Random, limit: int = 400) -> tuple[list[int], int]:
    """Tokens up to and with the end, by chance where there is a choice, and how many were forced.

    Closing tokens are preferred, so that strings come to an end.
    """
    tokens: list[int] = []
    num_forced = 0
    while len(tokens) < limit:
        assert matcher.stuck is None
        allowed = ids(matcher.allowed)
        if matcher.forced:
            assert allowed == [matcher.forced[0]]
            num_forced += 1
        closing = [t for t in allowed if t == EOS or TOKENS[t][:1] in b'"}]']
        printable = [t for t in allowed if TOKENS[t].isascii()]
        token = chance.choice(
            closing if closing and chance.random() < 0.5 else printable or allowed
        )
        tokens.append(token)
        if token == EOS:
            break
        matcher.accept(token)
    return tokens, num_forced


def spell(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens).decode()


names = st.text(string.ascii_lowercase + '_é"', min_size=1, max_size=12)
leaves = st.sampled_from(
    [{"type": "boolean"}, {"type": "null"}, {"const": "person"}, {"enum": ["name", "nap", "x"]}]
)
schemas = st.recursive(
    leaves,
    lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": list(properties),
        }
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(schemas, st.integers(0, 2**32))
def test_every_answer_is_json_of_the_schema_and_forced_text_is_the_only_text(
    schema: dict[str, Any], seed: int
) -> None:
    """At each forced token, xgrammar's own matcher allows only tokens of the same text."""
    compiled, plain = grammar(json=schema)
    tokens, num_forced = walk(compiled.begin(0), random.Random(seed))
    assert tokens[-1] == EOS
    document = json.loads(spell(tokens[:-1]))
    assert set(document) == set(schema["properties"]) if "properties" in schema else True
    assert num_forced >= len(schema.get("properties", ()))
    matcher, other = compiled.begin(0), xgrammar.GrammarMatcher(plain)
    mask = np.zeros((1, VOCABULARY.num_words), dtype=np.int32)
    for place, token in enumerate(tokens):
        assert (token == EOS) <= other.is_completed()
        other.fill_next_token_bitmask(mask)
        allowed = ids(mask[0])
        assert token in allowed
        if matcher.forced:
            run = b"".join(TOKENS[forced] for forced in matcher.forced)
            for rival in allowed:
                text = TOKENS[rival]
                assert run.startswith(text) or text.startswith(run), (run, text)
        else:
            assert ids(matcher.allowed) == allowed
        if token != EOS:
            matcher.accept(token)
            assert other.accept_token(token), place


@settings(max_examples=40, deadline=None)
@given(st.lists(names, min_size=1, max_size=4, unique=True), st.integers(0, 2**32))
def test_a_choice_is_one_of_the_choices(choices: list[str], seed: int) -> None:
    tokens, _ = walk(grammar(choice=choices)[0].begin(0), random.Random(seed))
    assert spell(tokens[:-1]) in choices


@pytest.mark.parametrize("pattern", [r"\d{3}-\d{4}", r"(ab|cd)+e?", r"[a-f]{2,5}\.x"])
def test_an_expression_is_matched_whole(pattern: str) -> None:
    for seed in range(10):
        tokens, _ = walk(grammar(regex=pattern)[0].begin(0), random.Random(seed))
        assert tokens[-1] != EOS or re.fullmatch(pattern, spell(tokens[:-1]))


def test_the_end_waits_for_min_tokens_where_the_grammar_can_go_on() -> None:
    matcher = grammar(regex="a+")[0].begin(3)
    for _ in range(3):
        assert ids(matcher.allowed) == [ord("a")]
        matcher.accept(ord("a"))
    assert EOS in ids(matcher.allowed)
    forced = grammar(choice=["a"])[0].begin(3)
    forced.accept(ord("a"))
    assert list(forced.forced) == [EOS]  # nothing else can follow


def test_the_last_forced_token_is_left_open_where_a_longer_one_could_stand() -> None:
    """After `": ` a number may follow, and `: 1` is a token: the model shall be asked."""
    matcher = grammar(grammar='root ::= "name: " ("1" | "2")')[0].begin(0)
    assert [TOKENS[t] for t in matcher.forced] == [b"name"]
    for token in list(matcher.forced):
        matcher.accept(token)
    assert {TOKENS[t] for t in ids(matcher.allowed)} == {b":", b": 1"}


def test_long_forced_text_is_forced_to_its_end() -> None:
    text = "person " * 200
    tokens, num_forced = walk(grammar(choice=[text])[0].begin(0), random.Random(0), limit=2000)
    assert spell(tokens[:-1]) == text
    assert num_forced == len(tokens)


def test_special_tokens_are_never_allowed() -> None:
    matcher = grammar(json={"type": "string"})[0].begin(0)
    matcher.accept(ord('"'))
    assert 257 not in ids(matcher.allowed)


def test_a_grammar_without_answers_is_stuck_and_says_so() -> None:
    matcher = grammar(grammar='root ::= "a" root')[0].begin(0)
    assert matcher.stuck is None  # endless, but never stuck
    assert grammar(json={"$ref": "#"})[0].begin(0).stuck is not None


def test_an_ambiguous_grammar_is_given_up_before_it_holds_up_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.grammar.state.MATCH_SLACK_S", 0.02)
    monkeypatch.setattr("engine.grammar.state.MATCH_S_PER_TOKEN", 0.0)
    matcher = grammar(grammar='root ::= root root root | "a" | "b"')[0].begin(0)
    num_tokens = 0
    while matcher.stuck is None and num_tokens < 2000:
        matcher.accept(ord("a"))
        num_tokens += 1
    assert matcher.stuck is not None and "ambiguous" in matcher.stuck


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "nothing"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"json": "{"}, "no JSON"),
        ({"json": 3}, "an object"),
        ({"regex": ""}, "not empty"),
        ({"choice": []}, "list of strings"),
        ({"choice": "ab"}, "list of strings"),
        ({"choice": ["a", 1]}, "list of strings"),
        ({"regex": "a" * (MAX_SOURCE_BYTES + 1)}, "longer than"),
    ],
)
def test_what_is_asked_for_is_checked(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said) as refused:
        source_of(StructuredOutputs(**asked))
    assert refused.value.param.startswith("structured_outputs")


def test_a_schema_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        schema = {"items": schema}
    with pytest.raises(InvalidParameter, match="deeper"):
        source_of(StructuredOutputs(json=schema))


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (SourceKind.REGEX, {"regex": "(abc"}),
        (SourceKind.JSON_SCHEMA, {"json": {"type": "strin"}}),
        (SourceKind.EBNF, {"grammar": "no rules"}),
    ],
)
def test_what_is_no_grammar_is_said_in_one_line(kind: SourceKind, asked: dict[str, Any]) -> None:
    source = source_of(StructuredOutputs(**asked))
    assert source.kind is kind
    with pytest.raises(InvalidParameter) as refused:
        COMPILER.compile(source)
    assert "\n" not in str(refused.value) and "/project/" not in str(refused.value)
