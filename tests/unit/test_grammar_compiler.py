"""The compiler's child: it compiles, it refuses, it is ended when it hangs, and another starts."""

from collections.abc import Iterator

import pytest

from engine.errors import InvalidParameter, StructureUnavailable
from engine.grammar.compiler import GrammarCompiler, compiler_for
from engine.structure import Source, SourceKind, StructuredOutputs, source_of
from engine.testing.models import EOS, bytes_tokenizer, tiny_model

# Optional properties in any combination: xgrammar needs seconds for 400 of them.
HOSTILE = {
    "type": "object",
    "properties": {f"property{number}": {"type": "string"} for number in range(1200)},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = compiler_for(tiny_model(), timeout_s=1.0)
    yield compiler
    compiler.close()


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    source = source_of(StructuredOutputs(choice=["yes", "no"]))
    assert compiler.known(source) is None
    made = compiler.compile(source)
    assert compiler.known(source) is compiler.compile(source) is made
    state = made.begin(0)
    for token in bytes_tokenizer().encode("yes"):
        state.accept(token)
    assert [EOS] == list(state.forced)


def test_what_is_wrong_is_told_with_the_field(compiler: GrammarCompiler) -> None:
    source = Source(SourceKind.REGEX, "(abc", "response_format")
    for _ in range(2):  # compiled, then remembered
        with pytest.raises(InvalidParameter, match="parenthesis") as refused:
            compiler.compile(source)
        assert "response_format" == refused.value.param
    elsewhere = Source(SourceKind.REGEX, "(abc", "guided_regex")
    with pytest.raises(InvalidParameter) as refused:
        compiler.known(elsewhere)
    assert "guided_regex" == refused.value.param


def test_a_hostile_schema_is_given_up_and_the_next_one_is_served(
    compiler: GrammarCompiler,
) -> None:
    with pytest.raises(InvalidParameter, match="cannot be compiled in 1 s"):
        compiler.compile(source_of(StructuredOutputs(json=HOSTILE)))
    assert compiler.compile(source_of(StructuredOutputs(regex="[ab]{3}"))) is not None


def test_what_is_remembered_is_bounded() -> None:
    small = GrammarCompiler(list, frozenset(), lambda text: (), cache_bytes=100, max_cached=3)
    for number in range(10):
        with pytest.raises(InvalidParameter, match="no end-of-sequence token"):
            small.compile(Source(SourceKind.REGEX, str(number)))
    known = sum(str(number) in {s.text for s in small._known} for number in range(10))
    assert 1 <= known <= 3


def test_a_missing_package_is_named(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StructureUnavailable, match=r"cachesvc\[structured\]"):
        compiler.compile(Source(SourceKind.REGEX, "never asked for before"))
