"""Structured output with vLLM: our bounds on compiling a grammar, vLLM's own matching.

vLLM compiles grammars in its engine core, which all requests share. So each grammar is first
compiled in a process that the kernel kills at a bound on CPU time. A grammar that fails there never
reaches vLLM.
"""

from dataclasses import dataclass
from typing import Any

from cachesvc.server.vllm.params import structure_of
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

    def known(self, source: GrammarSource, owner: str = "") -> Grammar | None:
        found = self._compiler.known(source, owner)
        return CheckedGrammar(source, found) if found is not None else None

    def compile(self, source: GrammarSource, owner: str = "") -> Grammar:
        return CheckedGrammar(source, self._compiler.compile(source, owner))

    def close(self) -> None:
        self._compiler.close()


def structure_in(grammar: Grammar | None) -> Any:
    """vLLM's parameters for a request's grammar, if any."""
    if grammar is None:
        return None
    assert isinstance(grammar, CheckedGrammar), grammar
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(**structure_of(grammar.source))
