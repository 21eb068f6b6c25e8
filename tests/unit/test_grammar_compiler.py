"""The compiler's child: it compiles, it refuses, it is ended when it hangs, and another starts."""

import gc
import random
import signal
import string
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.errors import InvalidParameter, QueueFull, StructureUnavailable
from engine.grammar.compiler import GrammarCompiler
from engine.structure import GrammarSource, GrammarState, SourceKind, StructuredOutputs, source_of
from tests.support.models import EOS, bytes_tokenizer

# Optional properties in any combination: xgrammar needs seconds for 400 of them.
HOSTILE = {
    "type": "object",
    "properties": {f"property{number}": {"type": "string"} for number in range(1200)},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    """Over as many tokens as make a hostile grammar slow; the first 257 are bytes and the end."""
    chance = random.Random(0)
    words = {"".join(chance.choices(string.ascii_lowercase, k=8)).encode() for _ in range(20_000)}
    tokens = [*(bytes([byte]) for byte in range(256)), b"", *sorted(words)]
    encode = bytes_tokenizer().encode
    compiler = GrammarCompiler(lambda: tokens, frozenset({EOS}), encode, timeout_s=1.0)
    yield compiler
    compiler.close()


def follow(state: GrammarState, token: int) -> None:
    state.accept(token)
    assert state.wait(10.0)


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    source = source_of(StructuredOutputs(choice=["yes", "no"]))
    assert compiler.known(source) is None
    made = compiler.compile(source)
    assert compiler.known(source) is compiler.compile(source) is made
    state = made.begin(0)
    for token in bytes_tokenizer().encode("yes"):
        follow(state, token)
    assert [EOS] == list(state.forced)


def test_what_is_wrong_is_told_with_the_field(compiler: GrammarCompiler) -> None:
    source = GrammarSource(SourceKind.REGEX, "(abc", "response_format")
    for _ in range(2):  # compiled, then remembered
        with pytest.raises(InvalidParameter, match="parenthesis") as refused:
            compiler.compile(source)
        assert "response_format" == refused.value.param
    elsewhere = GrammarSource(SourceKind.REGEX, "(abc", "guided_regex")
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
    small = GrammarCompiler(list, frozenset(), lambda text: (), max_refused=3)
    for number in range(10):
        with pytest.raises(InvalidParameter, match="no end-of-sequence token"):
            small.compile(GrammarSource(SourceKind.REGEX, str(number)))
    assert 3 == len(small._refused)


def test_of_a_refused_grammar_its_text_is_not_kept() -> None:
    """1,024 of 64 KiB, four bytes a character, were 268 MB for one key's tenant."""
    compiler = GrammarCompiler(list, frozenset(), lambda text: ())
    text = "x" * 60_000 + chr(0x1F600)
    for number in range(3):
        with pytest.raises(InvalidParameter, match="no end-of-sequence token"):
            compiler.compile(GrammarSource(SourceKind.REGEX, text + str(number)), "mine")
    for kept in (compiler._refused, compiler._kept):
        assert 1_000 > len(repr(kept))
    with pytest.raises(InvalidParameter, match="no end-of-sequence token"):
        compiler.known(GrammarSource(SourceKind.REGEX, text + "0"), "mine")
    assert compiler.known(GrammarSource(SourceKind.REGEX, text + "0"), "yours") is None


@pytest.mark.parametrize("pattern", ["(.?){150}x", "(.?){200}x"])
def test_an_expression_whose_first_token_takes_seconds_is_refused(
    compiler: GrammarCompiler, pattern: str
) -> None:
    with pytest.raises(InvalidParameter, match=r"too ambiguous|cannot be compiled"):
        compiler.compile(source_of(StructuredOutputs(regex=pattern)))


def test_a_grammar_that_turns_slow_ends_its_own_sequence(compiler: GrammarCompiler) -> None:
    """Nothing waits for it meanwhile, and another grammar continues."""
    trap = compiler.compile(source_of(StructuredOutputs(regex="[ab]{5}(.?){200}x")))
    other = compiler.compile(source_of(StructuredOutputs(regex="[ab]{6}")))
    caught, free = trap.begin(0), other.begin(0)
    for token in b"abab":
        follow(caught, token)
        follow(free, token)
    caught.accept(ord("a"))
    follow(free, ord("a"))
    assert not caught.wait(0.0), "it is still looking"
    assert caught.wait(30.0)
    assert caught.stuck is not None and "ambiguous" in caught.stuck
    follow(free, ord("a"))
    assert [EOS] == list(free.forced)
    again = compiler.compile(source_of(StructuredOutputs(regex="[ab]{5}(.?){200}x")))
    assert again is not trap and again.begin(0).stuck is None


@pytest.mark.parametrize(
    ("work", "ends"), [("time.sleep(0.6)", 0), ("while True: pass", -signal.SIGPROF)]
)
def test_a_grammars_time_is_its_own_cpu_time(work: str, ends: int) -> None:
    """Time lost to a busy machine does not count."""
    code = f"import time\nfrom engine.grammar import worker\nworker._bound_time(0.2)\n{work}"
    child = subprocess.run([sys.executable, "-c", code], check=False, timeout=100)
    assert ends == child.returncode


def test_a_schema_that_is_only_itself_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidParameter, match="no token of the model can follow"):
        compiler.compile(source_of(StructuredOutputs(json={"$ref": "#"})))


def test_states_of_one_grammar_do_not_mix(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(source_of(StructuredOutputs(regex="[ab]{2}c|[xy]{3}z")))
    first, second = grammar.begin(0), grammar.begin(0)
    for one, other in zip(b"ab", b"xy", strict=True):
        first.accept(one)
        second.accept(other)
        assert second.wait(10.0) and first.wait(10.0)
    assert [ord("c"), EOS] == [first.forced[0], EOS]
    follow(second, ord("x"))
    assert ord("z") == second.forced[0]


def test_owners_share_no_process(compiler: GrammarCompiler) -> None:
    source = source_of(StructuredOutputs(regex="[ab]{4}"))
    mine = compiler.compile(source, "mine")
    assert compiler.known(source, "yours") is None
    assert compiler.compile(source, "yours") is not mine
    assert compiler.known(source, "mine") is mine


def test_a_process_ends_when_nobody_needs_it(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_max_kept", 2)
    state = compiler.compile(source_of(StructuredOutputs(regex="[ab]{9}"))).begin(0)
    for number in range(4):
        compiler.compile(source_of(StructuredOutputs(regex=f"[cd]{{{number + 1}}}")))
    gc.collect()
    assert 3 == len(compiler._all)
    follow(state, ord("a"))
    del state
    gc.collect()
    assert 2 == len(compiler._all)


def test_grammars_in_use_are_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.grammar.compiler.MAX_PROCESSES", 2)
    used = [compiler.compile(source_of(StructuredOutputs(regex=f"[ef]{{{n}}}"))) for n in (1, 2)]
    with pytest.raises(QueueFull, match="2 grammars are in use"):
        compiler.compile(source_of(StructuredOutputs(regex="[ef]{3}")))
    del used
    assert compiler.compile(source_of(StructuredOutputs(regex="[ef]{3}"))) is not None


def test_a_nursery_that_was_killed_is_replaced(compiler: GrammarCompiler) -> None:
    before = compiler.compile(source_of(StructuredOutputs(regex="a+"))).begin(0)
    assert compiler._nursery is not None
    compiler._nursery.kill()
    compiler._nursery.wait()
    assert compiler.compile(source_of(StructuredOutputs(regex="b+"))) is not None
    follow(before, ord("a"))  # its own process lives on


def test_a_missing_package_is_named(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StructureUnavailable, match=r"cachesvc\[structured\]"):
        compiler.compile(GrammarSource(SourceKind.REGEX, "never asked for before"))
