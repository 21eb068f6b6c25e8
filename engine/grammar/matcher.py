"""Grammars over the model's vocabulary; the only module that imports xgrammar.

`Vocabulary` and `compile_source` are used by the compiler's child process
(`engine.grammar.worker`), `Vocabulary` and `CompiledGrammar` by the server: a `Matcher` follows one
sequence on the engine thread and says which tokens may come next, and which must.

Where the grammar leaves one text only, that text's tokens are the tokenizer's own: the model is not
asked how to spell it. So the answer is the same whether forced tokens are computed one by one or
all at once (the "jump-forward" of SGLang's compressed state machine, arXiv 2312.07104, section 4).
"""

import importlib.util
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidParameter, StructureUnavailable
from engine.structure import Source, SourceKind

MAX_AHEAD_BYTES = 256  # of forced text looked at in one go
# What matching may cost: a hostile grammar's ambiguity makes xgrammar's parser slow without bound
# (`root ::= root root root | "a"` took 0.13 s a token after 1,000 tokens), and the engine waits.
MATCH_SLACK_S = 1.0
MATCH_S_PER_TOKEN = 0.005


def check_installed() -> None:
    """Raises StructureUnavailable where the optional package is missing."""
    if importlib.util.find_spec("xgrammar") is None:
        raise StructureUnavailable(
            "structured output needs the package xgrammar, which is not installed here; the "
            "operator adds it with: pip install 'cachesvc[structured]'"
        )


class Vocabulary:
    """The tokens that grammars are matched against.

    `tokens[i]` are the bytes of token i, empty for special tokens, which no grammar may produce.
    `end` are the ids that end an answer. `encode` is the tokenizer's, without special tokens.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        end: Sequence[int],
        encode: Callable[[str], Sequence[int]] = lambda text: (),
    ) -> None:
        import xgrammar

        self.tokens = list(tokens)
        self.end = sorted(end)
        self.encode = encode
        self.num_words = -(-len(self.tokens) // 32)
        self.end_mask = self.mask_of(self.end)
        self.info: Any = xgrammar.TokenizerInfo(
            self.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(self.tokens),
            stop_token_ids=self.end,
        )
        self._lengths = np.array([len(token) for token in self.tokens], dtype=np.int32)
        first = np.array([token[0] if token else 256 for token in self.tokens], dtype=np.int32)
        self._begins = [self._pack(first == byte) for byte in range(257)]
        self._first = first
        self._longer: dict[int, NDArray[np.int32]] = {}

    def mask_of(self, ids: Sequence[int]) -> NDArray[np.int32]:
        """[num_words] with the bits of `ids`."""
        bits = np.zeros(len(self.tokens), dtype=np.bool_)
        bits[list(ids)] = True
        return self._pack(bits)

    def longer_than(self, num_bytes: int) -> NDArray[np.int32]:
        """The tokens of more than `num_bytes` bytes."""
        if num_bytes not in self._longer:
            self._longer[num_bytes] = self._pack(self._lengths > num_bytes)
        return self._longer[num_bytes]

    def only_byte(self, allowed: NDArray[np.int32]) -> int | None:
        """The byte that every allowed token begins with; None where they differ or may end."""
        token = self.only_token(allowed, any_of=True)
        if token is None or not self.tokens[token]:
            return None
        byte = int(self._first[token])
        return None if (allowed & ~self._begins[byte]).any() else byte

    def only_token(self, allowed: NDArray[np.int32], *, any_of: bool = False) -> int | None:
        """The one token allowed, or the first with `any_of`; None where there is none."""
        words = np.flatnonzero(allowed)
        if len(words) == 0 or (len(words) > 1 and not any_of):
            return None
        word = int(allowed[words[0]]) & 0xFFFFFFFF
        lowest = word & -word
        if word != lowest and not any_of:
            return None
        return int(words[0]) * 32 + lowest.bit_length() - 1

    def _pack(self, bits: NDArray[np.bool_]) -> NDArray[np.int32]:
        padded = np.zeros(self.num_words * 32, dtype=np.bool_)
        padded[: len(bits)] = bits
        return np.packbits(padded, bitorder="little").view(np.int32)


def compile_source(compiler: Any, source: Source) -> Any:
    """An xgrammar.CompiledGrammar. Raises InvalidParameter with xgrammar's words on what is wrong.

    A schema's objects are written as `json.dumps` does, ", " between and ": " after keys: a model
    that may put white space anywhere can go on putting it, and it leaves less to jump over.
    """
    try:
        match source.kind:
            case SourceKind.JSON_SCHEMA:
                return compiler.compile_json_schema(source.text, any_whitespace=False)
            case SourceKind.JSON_OBJECT:
                return compiler.compile_json_schema(
                    '{"type": "object"}', strict_mode=False, max_whitespace_cnt=8
                )
            case SourceKind.REGEX:
                return compiler.compile_regex(source.text)
            case SourceKind.EBNF:
                return compiler.compile_grammar(source.text)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InvalidParameter(_reason(error)) from None


def new_compiler(vocabulary: Vocabulary) -> Any:
    import xgrammar

    return xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)


def _reason(error: Exception) -> str:
    """xgrammar's message without the time and place in its own source that it begins with."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    place, found, rest = text.partition(": ")
    return (rest if found and place.startswith("[") else text)[:300]


class CompiledGrammar:
    """A grammar ready to be followed; see `engine.structure.Grammar`. Any thread."""

    def __init__(self, vocabulary: Vocabulary, serialised: str) -> None:
        """`serialised` is what `xgrammar.CompiledGrammar.serialize_json` gave."""
        import xgrammar

        self._vocabulary = vocabulary
        self._compiled = xgrammar.CompiledGrammar.deserialize_json(serialised, vocabulary.info)

    @property
    def num_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def begin(self, min_tokens: int) -> "Matcher":
        import xgrammar

        inner = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=self._vocabulary.end)
        return Matcher(self._vocabulary, inner, min_tokens)


class Matcher:
    """One sequence's place in its grammar; see `engine.structure.GrammarState`.

    Invariant: the inner matcher stands before `forced[0]`, or before the model's choice.
    """

    def __init__(self, vocabulary: Vocabulary, inner: Any, min_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._inner = inner
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._spent_s = 0.0
        self.forced: deque[int] = deque()
        self.stuck: str | None = None
        self._choice = np.zeros((1, vocabulary.num_words), dtype=np.int32)
        self._row: NDArray[np.int32] = self._choice[0]
        self._timed(self._look_ahead)

    @property
    def allowed(self) -> NDArray[np.int32]:
        if self.forced:
            return self._vocabulary.mask_of([self.forced[0]])
        return self._row

    def accept(self, token: int) -> None:
        self._num_tokens += 1
        if token in self._vocabulary.end:
            self.forced.clear()
            return
        expected = self.forced.popleft() if self.forced else token
        assert token == expected, (token, expected)
        self._timed(lambda: self._follow(token))

    def _follow(self, token: int) -> None:
        accepted = self._inner.accept_token(token)
        assert accepted, f"token {token} was allowed and is not accepted"
        if not self.forced:
            self._look_ahead()

    def _timed(self, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        work()
        self._spent_s += time.perf_counter() - started
        if self._spent_s > MATCH_SLACK_S + MATCH_S_PER_TOKEN * self._num_tokens:
            self.stuck = (
                f"the grammar is too ambiguous: matching {self._num_tokens} tokens took "
                f"{self._spent_s:.1f} s"
            )

    def _look_ahead(self) -> None:
        """Find what must come next, and otherwise what may."""
        vocabulary = self._vocabulary
        mask = self._fill()
        end = mask & vocabulary.end_mask
        goes_on = (mask & ~vocabulary.end_mask).any()
        if end.any() and goes_on:
            if self._num_tokens < self._min_tokens:
                mask &= ~vocabulary.end_mask
            return
        if not goes_on:
            if end.any():
                self.forced.append(vocabulary.end[0])
            else:
                self.stuck = "no token of the model can follow under this grammar"
            return
        self.forced += self._forced_tokens()
        if not self.forced:
            only = vocabulary.only_token(self._fill())
            if only is not None:
                self.forced.append(only)

    def _forced_tokens(self) -> list[int]:
        """The tokenizer's tokens of the text that must follow, up to where a longer token than
        what is left of it could stand: there the model chooses."""
        text = self._forced_text()
        tokens = list(self._vocabulary.encode(text)) if text else []
        spelt = [self._vocabulary.tokens[token] for token in tokens]
        if b"".join(spelt) != text.encode():
            return []  # a tokenizer that adds to a text's beginning
        kept: list[int] = []
        rest = sum(map(len, spelt))
        for token, piece in zip(tokens, spelt, strict=True):
            crosses = (self._fill() & self._vocabulary.longer_than(rest)).any()
            if crosses or not self._inner.accept_token(token):
                break
            kept.append(token)
            rest -= len(piece)
        if kept:
            self._inner.rollback(len(kept))
        return kept

    def _forced_text(self) -> str:
        """The beginning of the text that the grammar leaves no choice about, in whole characters.

        Found byte by byte: xgrammar's own `find_jump_forward_string` has no bound, and a few lines
        of grammar may force a gigabyte.
        """
        text = bytearray()
        while len(text) < MAX_AHEAD_BYTES:
            byte = self._vocabulary.only_byte(self._fill())
            if byte is None or not self._inner.accept_string(bytes([byte])):
                break
            text.append(byte)
        if text:
            self._inner.rollback(len(text))
        return text.decode("utf-8", errors="ignore")

    def _fill(self) -> NDArray[np.int32]:
        if not self._inner.fill_next_token_bitmask(self._choice):
            self._choice.fill(-1)
        return self._row
