"""Grammars matched in this process, for tests. The same matcher and state, without a child."""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from engine.grammar.matcher import Look, Matcher, VocabularyCompiler
from engine.grammar.state import MatcherState
from engine.structure import GrammarSource


class LocalGrammar:
    """An `engine.structure.Grammar` compiled in this process. It answers at once."""

    def __init__(self, compiler: VocabularyCompiler, source: GrammarSource) -> None:
        self.compiled: Any = compiler.compile(source)
        self._vocabulary = compiler.vocabulary
        self._matchers: dict[int, Matcher] = {}

    def begin(self, min_tokens: int) -> MatcherState:
        number = len(self._matchers)
        self._matchers[number] = self._new()
        return MatcherState(
            self._vocabulary, self, self._first, number=number, min_tokens=min_tokens
        )

    def ask(self, state: MatcherState, tokens: Sequence[int]) -> None:
        begun_s = time.thread_time()
        look = self._matchers[state.number].follow(tokens)
        spent_s = time.thread_time() - begun_s
        state.received(Look(look.mask, look.text, look.crosses, spent_s))

    def wait(self, state: MatcherState, timeout_s: float) -> None:
        pass

    @cached_property
    def _first(self) -> Look:
        return self._new().follow([])

    def _new(self) -> Matcher:
        return Matcher(self._vocabulary, self.compiled)
