"""Structured output with vLLM: our acceptance and bounds, vLLM's own matching by llguidance.

Each grammar is compiled here first, so what cannot be enforced is refused before vLLM's engine
core, which all requests share, sees it.
"""

from dataclasses import dataclass
from typing import Any

from engine.grammar.compiler import GrammarCompiler
from engine.structure import Grammar, GrammarSource, GrammarState


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A grammar that compiles within the bounds, and the text that vLLM compiles again."""

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


def structure_in(grammar: Grammar | None) -> Any:
    """vLLM's parameters for a request's grammar, if any."""
    if grammar is None:
        return None
    assert isinstance(grammar, CheckedGrammar), grammar
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(grammar=grammar.source.text)


def guidance() -> Any:
    """vLLM's configuration with the backend that reads llguidance's grammars."""
    from vllm.config import StructuredOutputsConfig

    return StructuredOutputsConfig(backend="guidance")
