"""What a body asks of its answer: the form, the length, and how tokens are drawn.

`response_format` is OpenAI's, `structured_outputs` vLLM's. `engine.grammar` compiles it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from api.errors import InvalidRequest, Unsupported
from api.served_model import ServedModel
from api.shapes.schemas import ChatBody, GenerationBody
from api.shapes.template import Tooling
from api.tools.choice import either_grammar, forced_grammar, strict_grammar
from api.tools.style import Style
from engine.request import SamplingParams
from engine.structure import GrammarSource, StructuredOutputs, check_size, source_of

_SERVED = ("json", "regex", "choice", "grammar", "json_object")
_REFUSED = ("structural_tag", "whitespace_pattern")


def chat_answer(
    body: ChatBody,
    model: ServedModel,
    tooling: Tooling,
    style: Style,
    num_tokens: int,
    *,
    thinking: bool,
    limit: str | None = None,
) -> tuple[SamplingParams, tuple[str, ...], GrammarSource | None]:
    """Of the answer to a prompt of `num_tokens`: how its tokens are drawn, what ends it, and its
    required form. `limit` is the protocol's own name of the body's.

    Raises ContextLengthExceeded if the prompt leaves too few tokens, and what is wrong with a form.
    """
    source = tools_source(tooling, style, source_asked(body), thinking=thinking)
    given = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    most, limit = getattr(body, given), limit or given
    room = model.room_for_answer(num_tokens, most, prompt="messages", limit=limit)
    params = body.sampling(room)
    if tooling.choice.forced:  # a stop would cut the call, which is no text
        return replace(params, stop_token_ids=()), (), source
    return params, body.stop_strings, source


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


def tools_source(
    tooling: Tooling, style: Style, source: GrammarSource | None, *, thinking: bool
) -> GrammarSource | None:
    """The grammar of an answer that may be calls; `source` is the required form otherwise."""
    if not tooling.may_call:
        return source
    tools, choice = tooling.tools, tooling.choice
    if choice.forced:
        # OpenAI's field constrains only text, which a forced call has not; vLLM's the whole answer.
        if source is not None and not source.field.startswith("response_format"):
            raise InvalidRequest(
                f"tool_choice forces a call, but {source.field} requires the answer to be "
                "something else; give one.",
                param="tool_choice",
            )
        return _source(forced_grammar(style, tools, choice, thinking=thinking))
    if source is not None:
        if source.document is None:
            raise Unsupported(
                f"{source.field} is not served beside tools; give a JSON schema, or no tools.",
                param=source.field,
            )
        return _source(either_grammar(style, tools, choice, source.document, thinking=thinking))
    if tooling.strict and style.has_text_marks and not thinking:
        return _source(strict_grammar(style, tools, choice))
    return None


def _source(text: str) -> GrammarSource:
    check_size(text, "tools")
    return GrammarSource(text, "tools")


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


def _structured_outputs(given: dict[str, Any]) -> StructuredOutputs:
    for name in _REFUSED:
        if given.get(name) is not None:
            raise Unsupported(
                f"structured_outputs.{name} is not served; leave it out.",
                param=f"structured_outputs.{name}",
            )
    return StructuredOutputs(**{name: given[name] for name in _SERVED if name in given})
