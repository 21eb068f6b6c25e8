"""Compiles and matches grammars. The only module that imports xgrammar.

An untrusted grammar can make either slow without bound: `(.?){200}x` took 31 s before its first
token. So both run in child processes (`engine.grammar.worker`), which can be killed.
"""

import importlib.util
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import InvalidParameter, StructureUnavailable
from engine.grammar.vocabulary import Mask, Vocabulary
from engine.structure import GrammarSource, SourceKind

MAX_AHEAD_BYTES = 256  # of forced text found at a time
_LOOK = struct.Struct("<dI")  # CPU seconds, bytes of text


def check_installed() -> None:
    """Raise StructureUnavailable if the optional package is missing."""
    if importlib.util.find_spec("xgrammar") is None:
        raise StructureUnavailable(
            "structured output needs the package xgrammar, which is not installed here; the "
            "operator adds it with: pip install 'cachesvc[structured]'"
        )


@dataclass(frozen=True, slots=True)
class Look:
    """What a grammar says about the next tokens: which are allowed, and which text is forced.

    `text` is the text with which every answer continues, in whole characters. `crosses[i]` tells
    whether, after `i` bytes of it, a token is allowed that is longer than the rest.
    """

    mask: Mask
    text: bytes = b""
    crosses: bytes = b""
    cpu_s: float = 0.0

    def pack(self) -> bytes:
        head = _LOOK.pack(self.cpu_s, len(self.text))
        return b"".join((head, self.text, self.crosses, self.mask.tobytes()))

    @classmethod
    def unpack(cls, packed: bytes) -> "Look":
        cpu_s, length = _LOOK.unpack_from(packed)
        text, crosses, mask = (
            packed[_LOOK.size : _LOOK.size + length],
            packed[_LOOK.size + length : _LOOK.size + 2 * length],
            packed[_LOOK.size + 2 * length :],
        )
        return cls(np.frombuffer(mask, dtype=np.int32).copy(), text, crosses, cpu_s)


class VocabularyCompiler:
    """Compiles sources for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            vocabulary.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=vocabulary.end,
        )
        self.vocabulary = vocabulary
        self._inner: Any = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, source: GrammarSource) -> Any:
        """Compile to an xgrammar.CompiledGrammar. Raises InvalidParameter with xgrammar's message.

        A schema's objects are written as by `json.dumps`, with ", " between items and ": " after
        keys. If white space were allowed anywhere, a model could write it without end, and less
        text would be forced.
        """
        try:
            match source.kind:
                case SourceKind.JSON_SCHEMA:
                    return self._inner.compile_json_schema(source.text, any_whitespace=False)
                case SourceKind.JSON_OBJECT:
                    return self._inner.compile_json_schema(
                        '{"type": "object"}', strict_mode=False, max_whitespace_cnt=8
                    )
                case SourceKind.REGEX:
                    return self._inner.compile_regex(source.text)
                case SourceKind.EBNF:
                    return self._inner.compile_grammar(source.text)
                case SourceKind.STRUCTURAL_TAG:
                    return self._inner.compile_structural_tag(source.text)
        except (RuntimeError, ValueError, TypeError) as error:
            raise InvalidParameter(_reason(error)) from None


def _reason(error: Exception) -> str:
    """xgrammar's message, without the time and source location at its start."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    place, found, rest = text.partition(": ")
    return (rest if found and place.startswith("[") else text)[:300]


class Matcher:
    """One sequence's position in a grammar from `VocabularyCompiler.compile`."""

    def __init__(self, vocabulary: Vocabulary, compiled: Any) -> None:
        import xgrammar

        self._vocabulary = vocabulary
        self._inner: Any = xgrammar.GrammarMatcher(compiled, override_stop_tokens=vocabulary.end)
        self._choice = np.zeros((1, vocabulary.num_words), dtype=np.int32)

    def follow(self, tokens: Sequence[int]) -> Look:
        """Advance by tokens, each of which was allowed, and find the next allowed ones."""
        for token in tokens:
            accepted = self._inner.accept_token(token)
            assert accepted, f"token {token} was allowed and is not accepted"
        mask, end = self._fill(), self._vocabulary.end_mask
        if (mask & end).any() or not (mask & ~end).any():
            return Look(mask)
        text, masks = self._forced_text(mask)
        crosses = bytes(
            bool((masks[i] & self._vocabulary.longer_than(len(text) - i)).any())
            for i in range(len(text))
        )
        return Look(mask, text, crosses)

    def _forced_text(self, mask: Mask) -> tuple[bytes, list[Mask]]:
        """The beginning of the forced text, in whole characters, and the tokens allowed before each
        byte.

        Found byte by byte, because xgrammar's own `find_jump_forward_string` has no bound, and a
        few lines of grammar may force a gigabyte.
        """
        text, masks = bytearray(), [mask]
        while len(text) < MAX_AHEAD_BYTES:
            byte = self._vocabulary.only_byte(masks[-1])
            if byte is None or not self._inner.accept_string(bytes([byte])):
                break
            text.append(byte)
            masks.append(self._fill())
        if text:
            self._inner.rollback(len(text))
        return text.decode("utf-8", errors="ignore").encode(), masks

    def _fill(self) -> Mask:
        if not self._inner.fill_next_token_bitmask(self._choice):
            self._choice.fill(-1)
        row: Mask = self._choice[0].copy()
        return row
