"""What an answer must look like, from the fields that ask for it to a compiled grammar.

`response_format` is OpenAI's; `structured_outputs` and `guided_*` are vLLM's, `regex`, `ebnf` and
`json_schema` SGLang's. Compiling happens on a thread of its own, so that neither the event loop nor
who tokenises waits for it; how long it may take, `engine.grammar.compiler` bounds.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from api.collaborators import Collaborators
from api.errors import InvalidRequest, Overloaded, Unsupported
from api.shapes.schemas import GenerationBody
from engine.structure import Grammar, Source, StructuredOutputs, source_of

MAX_PENDING = 32  # grammars that wait to be compiled
_SERVED = ("json", "regex", "choice", "grammar", "json_object")
_REFUSED = ("structural_tag", "whitespace_pattern")
_FIELDS = (  # a field of the body, and what it asks for
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("json_schema", "json"),
    ("regex", "regex"),
    ("ebnf", "grammar"),
)


class Compiler(Protocol):
    """See `engine.grammar.compiler.GrammarCompiler`."""

    def known(self, source: Source) -> Grammar | None: ...

    def compile(self, source: Source) -> Grammar: ...


class GrammarDesk:
    """Compiles grammars for requests, one at a time; what is known is answered at once."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cachesvc-grammar")
        self._pending = 0

    async def get(self, source: Source) -> Grammar:
        """The grammar. Raises Overloaded, and what the compiler raises."""
        known = self._compiler.known(source)
        if known is not None:
            return known
        if self._pending >= MAX_PENDING:
            raise Overloaded(
                f"{self._pending} grammars wait to be compiled, as many as are allowed; retry "
                "shortly."
            )
        self._pending += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._compiler.compile, source)
        finally:
            self._pending -= 1

    def close(self) -> None:
        self._thread.shutdown()


def source_asked(body: GenerationBody) -> Source | None:
    """The one constraint that a body asks for. Raises InvalidRequest for several, and what
    `engine.structure.source_of` raises."""
    asked = list(_asked(body))
    if len(asked) > 1:
        names = " and ".join(field for field, _ in asked)
        raise InvalidRequest(
            f"{names} each say what the answer must look like; give one.", param=asked[1][0]
        )
    return source_of(asked[0][1], asked[0][0]) if asked else None


async def compiled(wire: Collaborators, source: Source) -> Grammar:
    if wire.grammars is None:
        raise Unsupported("Structured output is not served here.", param=source.field)
    return await wire.grammars.get(source)


def _asked(body: GenerationBody) -> Iterator[tuple[str, StructuredOutputs]]:
    """Each field that constrains the answer, and how."""
    chosen = body.response_format
    if chosen is not None and chosen.type == "json_object":
        yield "response_format", StructuredOutputs(json_object=True)
    if chosen is not None and chosen.type == "json_schema":
        if chosen.json_schema is None:
            raise InvalidRequest(
                "Missing required parameter: 'response_format.json_schema'.",
                param="response_format.json_schema",
            )
        schema: Any = chosen.json_schema.schema_
        if isinstance(schema, bool):
            schema = "true" if schema else "false"
        yield "response_format.json_schema.schema", StructuredOutputs(json=schema)
    if body.structured_outputs is not None:
        yield "structured_outputs", _structured_outputs(body.structured_outputs)
    for field, kind in _FIELDS:
        value = getattr(body, field)
        if value is not None:
            yield field, StructuredOutputs(**{kind: value})


def _structured_outputs(given: dict[str, Any]) -> StructuredOutputs:
    for name in _REFUSED:
        if given.get(name) is not None:
            raise Unsupported(
                f"structured_outputs.{name} is not served; leave it out.",
                param=f"structured_outputs.{name}",
            )
    return StructuredOutputs(**{name: given[name] for name in _SERVED if name in given})
