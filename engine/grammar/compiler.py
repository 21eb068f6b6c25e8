"""Compiles grammars for a model's vocabulary. The only module that imports llguidance.

`compile` takes a millisecond for an ordinary grammar, and at most a few hundred for one that the
bounds allow. Callers keep it off the event loop and the engine thread.
"""

import importlib.util
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidParameter, StructureUnavailable
from engine.grammar.state import Look, MatcherState, Vocabulary, look
from engine.models.describe import Speaking
from engine.structure import Grammar, GrammarSource

FIRST_LOOK_S = 0.5  # CPU time; an ordinary one takes less than a millisecond
NUM_THREADS = 2  # for slow looks, during which the interpreter lock is free
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,  # 10 ms; half of llguidance's own limit, as are the states
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 100_000,  # 1 kB each
    "verbose_errors": False,
}


def check_installed() -> None:
    """Raise StructureUnavailable if the optional package is missing."""
    if importlib.util.find_spec("llguidance") is None:
        raise StructureUnavailable(
            "structured output needs the package llguidance, which is not installed here; the "
            "operator adds it with: pip install 'cachesvc[structured]'"
        )


def compiler_for(loaded: Speaking) -> "GrammarCompiler":
    """The compiler for a model's vocabulary."""
    tokenizer, special = loaded.tokenizer, loaded.tokenizer.special_token_ids

    def tokens() -> list[bytes]:
        ids = range(loaded.vocab_size)
        return [b"" if i in special else tokenizer.token_bytes(i) for i in ids]

    def encode(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return GrammarCompiler(tokens, loaded.eos_token_ids, encode)


class GrammarCompiler:
    """Thread-safe. `close` ends its threads.

    `tokens[i]` holds token i's bytes, empty for special tokens. `end` holds the ids that end an
    answer.
    """

    def __init__(
        self,
        tokens: Callable[[], Sequence[bytes]],
        end: frozenset[int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self._tokens = tokens
        self._end = end
        self._encode = encode
        self._lock = threading.Lock()  # so that the vocabulary is read only once
        self._made: tuple[Any, Vocabulary] | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="cachesvc-grammar")

    def compile(self, source: GrammarSource) -> Grammar:
        """Compile the grammar of `source`.

        Raises InvalidParameter, naming the field, if it is not a grammar, too large, or has no
        answer. Raises StructureUnavailable without llguidance.
        """
        check_installed()
        from llguidance import LLMatcher, LLParserLimits

        if not self._end:
            raise _refused(source, "the model has no end-of-sequence token to end a grammar")
        tokenizer, vocabulary = self._vocabulary()
        matcher = LLMatcher(tokenizer, source.text, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise _refused(source, matcher.get_error())
        first = look(matcher, (), vocabulary)
        if first.stuck is not None:
            raise _refused(source, f"it has no answer: {first.stuck}")
        if first.cpu_s > FIRST_LOOK_S:
            raise _refused(source, "it is too ambiguous: its first token takes too long")
        return CompiledGrammar(source, matcher, first, vocabulary, self._threads)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _vocabulary(self) -> tuple[Any, Vocabulary]:
        from llguidance import LLTokenizer

        with self._lock:
            if self._made is None:
                spelling: Any = Spelling(list(self._tokens()), sorted(self._end), self._encode)
                tokenizer = LLTokenizer(spelling, eos_token=spelling.end)
                spelling.greedy = tokenizer.greedy_tokenize
                self._made = tokenizer, Vocabulary(len(spelling.tokens), spelling.end)
            return self._made


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A matcher before its first token, of which each sequence gets a copy."""

    source: GrammarSource
    matcher: Any
    first: Look
    vocabulary: Vocabulary
    threads: ThreadPoolExecutor

    def begin(self, min_tokens: int) -> MatcherState:
        copy = self.matcher.deep_copy()
        return MatcherState(copy, self.first, self.vocabulary, self.threads, min_tokens)


class Spelling:
    """The tokenizer, by the names that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], end: list[int], encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.tokens = tokens
        self.end = end
        self.eos_token_id = end[0]
        self.special_token_ids = [number for number, token in enumerate(tokens) if not token]
        self.greedy: Callable[[str], Sequence[int]] = encode
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """The tokenizer's tokens; the longest at each place if it adds something before a text."""
        ids = list(self._encode(text))
        if b"".join(self.tokens[token] for token in ids) != text.encode():
            return list(self.greedy(text))
        return ids


def _refused(source: GrammarSource, error: str) -> InvalidParameter:
    """An error in one line, with the place of the keyword that it names."""
    reason = re.sub(
        r"at \d+\(\d+\): (failed to compile JSON schema: )?", "", " ".join(error.split())
    )
    if "oneOf" in reason:
        reason = "oneOf needs alternatives that exclude each other by type or by a constant"
    found = [place for keyword, place in source.places.items() if keyword in reason]
    at = f" at {found[0][:200]}" if found else ""
    return InvalidParameter(f"{source.field}{at}: {reason[:300]}", param=source.field)
