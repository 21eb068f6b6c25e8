"""The required form of an answer, from the body's fields.

`response_format` is OpenAI's; `structured_outputs` and `guided_*` are vLLM's, `regex`, `ebnf` and
`json_schema` SGLang's. `engine.grammar` compiles it.
"""

from collections.abc import Iterator
from typing import Any

from api.errors import InvalidRequest, Unsupported
from api.shapes.schemas import GenerationBody
from engine.structure import GrammarSource, StructuredOutputs, source_of

_SERVED = ("json", "regex", "choice", "grammar", "json_object")
_REFUSED = ("structural_tag", "whitespace_pattern")
_FIELDS = (  # a field of the body, and its constraint
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("json_schema", "json"),
    ("regex", "regex"),
    ("ebnf", "grammar"),
)


def source_asked(body: GenerationBody) -> GrammarSource | None:
    """The one constraint that a body asks for.

    Raises InvalidRequest for several, and the errors of `engine.structure.source_of`.
    """
    asked = list(_asked(body))
    if len(asked) > 1:
        names = " and ".join(field for field, _ in asked)
        raise InvalidRequest(
            f"{names} each define the form of the answer; give only one.", param=asked[1][0]
        )
    return source_of(asked[0][1], asked[0][0]) if asked else None


def _asked(body: GenerationBody) -> Iterator[tuple[str, StructuredOutputs]]:
    """Each field that constrains the answer, with its constraint."""
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
