"""Compiles requests' grammars on a few threads of their own.

Neither the event loop nor tokenisation waits for them. `engine.grammar.compiler` bounds the time of
one grammar; here tenants take turns.
"""

from typing import Protocol

from api.access.fair_pool import FairPool
from engine.structure import Grammar, GrammarSource

NUM_THREADS = 2  # so that one tenant's slow grammar does not keep the others waiting
MAX_PENDING = 32  # grammars being compiled or waiting for it


class Compiler(Protocol):
    """See `engine.grammar.compiler.GrammarCompiler`."""

    def known(self, source: GrammarSource, owner: str) -> Grammar | None: ...

    def compile(self, source: GrammarSource, owner: str) -> Grammar: ...


class GrammarPool:
    """Compiles grammars for requests. A known grammar is returned at once."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._pool = FairPool(
            NUM_THREADS,
            max_pending=MAX_PENDING,
            name="cachesvc-grammar",
            what="grammars wait to be compiled",
        )

    async def get(self, tenant: str, source: GrammarSource) -> Grammar:
        """The compiled grammar. Raises Overloaded, and the compiler's errors."""
        known = self._compiler.known(source, tenant)
        if known is not None:
            return known
        return await self._pool.run(tenant, lambda: self._compiler.compile(source, tenant))

    def close(self) -> None:
        self._pool.close()
