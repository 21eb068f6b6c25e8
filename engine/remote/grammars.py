"""Structured output by an engine elsewhere: our acceptance and bounds, its own matching.

Each grammar is compiled here first, so what cannot be enforced is refused before an engine that all
requests share sees it.
"""

from dataclasses import dataclass

from engine.grammar.compiler import GrammarCompiler
from engine.structure import Grammar, GrammarSource, GrammarState


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A grammar that compiles within the bounds, and the text that the engine compiles again."""

    source: GrammarSource
    compiled: Grammar

    def begin(self, min_tokens: int) -> GrammarState:
        return self.compiled.begin(min_tokens)


class CheckedGrammars:
    """See `engine.grammar.compiler.GrammarCompiler`, which does the work."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def compile(self, source: GrammarSource) -> Grammar:
        return CheckedGrammar(source, self._compiler.compile(source))

    def close(self) -> None:
        self._compiler.close()


def grammar_text(grammar: Grammar) -> str:
    """In llguidance's Lark."""
    assert isinstance(grammar, CheckedGrammar), grammar
    return grammar.source.text
