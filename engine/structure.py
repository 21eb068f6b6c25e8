"""The required form of an answer: structured output as a request states it.

`StructuredOutputs` is what a caller asks for. `GrammarSource` is the same in one checked form.
`Grammar` and `GrammarState` are what the engine needs of a compiled grammar (see
`engine.grammar`). Pure values and protocols, for any thread.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.ebnf import lark_of, lark_string
from engine.errors import InvalidParameter
from engine.schema import accept_schema, expression_fault

MAX_SOURCE_BYTES = 64 * 1024  # of a schema, an expression or a grammar; compiling is slower
MAX_DEPTH = 100  # of nesting in a document; parsers and templates recurse
MAX_VALUES = MAX_SOURCE_BYTES  # in a document; each takes at least one byte


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The required form of the answer, under vLLM's names. Exactly one is set.

    `json` is a JSON schema, as an object or as text. `regex` must match the whole answer. `choice`
    lists the possible answers. `grammar` holds rules in EBNF with a rule `root`.
    `json_object` allows any JSON object.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar in llguidance's Lark. `field` is the request's field that errors name.

    `document` is the rule's body if the answer is a JSON document, `places` where its schema has
    each keyword.
    """

    text: str
    field: str = dataclasses.field(default="structured_outputs", compare=False)
    document: str | None = dataclasses.field(default=None, compare=False)
    places: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)


class GrammarState(Protocol):
    """One sequence's position in its grammar. Engine thread only.

    Invariant: once `ready`, either `forced` names the tokens that must come next, or the model
    chooses among `allowed`. If neither holds, `stuck` says why no token can follow.
    """

    @property
    def ready(self) -> bool:
        """Whether the allowed tokens are known yet. Another thread may be finding them."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until it is ready. Returns whether it is."""
        ...

    @property
    def allowed(self) -> NDArray[np.int32]:
        """[ceil(vocabulary / 32)] bits. Only the first of `forced`, if there is one."""
        ...

    @property
    def forced(self) -> Sequence[int]: ...

    @property
    def stuck(self) -> str | None: ...

    def accept(self, token: int) -> None:
        """Advance by the next token, which must be one of `allowed`."""
        ...


class Grammar(Protocol):
    """A compiled grammar. Any thread."""

    @property
    def source(self) -> GrammarSource: ...

    def begin(self, min_tokens: int) -> GrammarState:
        """The state before the first token. While the grammar can continue, the end is not allowed
        before `min_tokens`."""
        ...


class Compiler(Protocol):
    """See `engine.grammar.compiler.GrammarCompiler`. Any thread but the event loop."""

    def compile(self, source: GrammarSource) -> Grammar: ...


def source_of(asked: StructuredOutputs, field: str = "structured_outputs") -> GrammarSource:
    """The one form requested.

    Raises InvalidParameter, naming the field, if there is none or more than one, or if it is of the
    wrong type, too large or nested too deeply. Compiling checks the syntax.
    """
    given = [f.name for f in fields(asked) if getattr(asked, f.name) not in (None, False)]
    if len(given) != 1:
        raise InvalidParameter(
            f"{field} asks for {' and '.join(given) or 'nothing'}; give exactly one of "
            f"{', '.join(f.name for f in fields(asked))}",
            param=field,
        )
    [name] = given
    path = f"{field}.{name}" if field == "structured_outputs" else field
    made: GrammarSource = _MAKERS[name](getattr(asked, name), path)
    return made


def check_document(document: object, path: str) -> None:
    """Raise InvalidParameter for more than MAX_VALUES values or nesting deeper than MAX_DEPTH.

    Counts level by level without recursion, since the document is untrusted.
    """
    depth, num_values, level = 0, 0, [document] if document is not None else []
    while level:
        depth, num_values = depth + 1, num_values + len(level)
        if depth > MAX_DEPTH:
            raise InvalidParameter(f"{path} is nested deeper than {MAX_DEPTH} levels", param=path)
        if num_values > MAX_VALUES:
            raise InvalidParameter(f"{path} has more than {MAX_VALUES} values", param=path)
        inner: list[object] = []
        for one in level:
            if isinstance(one, Mapping):
                inner += one.values()
            elif isinstance(one, list | tuple):
                inner += one
        level = inner


def document_rule(schema: object, path: str) -> GrammarSource:
    """The source of a JSON document of `schema`, in one line as `json.dumps` writes it.

    White space anywhere would let a model write it without end, and less text would be forced.
    """
    accepted = accept_schema(schema, path)
    rule = _json_rule(accepted.schema, item_separator=", ", key_separator=": ")
    return GrammarSource(f"start: {rule}", path, rule, accepted.places)


def check_size(text: str, path: str) -> None:
    if len(text.encode("utf-8", errors="replace")) > MAX_SOURCE_BYTES:
        raise InvalidParameter(
            f"{path} is longer than {MAX_SOURCE_BYTES} bytes; give a smaller one", param=path
        )


def _json_rule(schema: Any, **separators: Any) -> str:
    options = {"whitespace_flexible": False, **separators}
    return f"%json {json.dumps({'x-guidance': options, **schema}, ensure_ascii=False)}"


def _from_json(schema: object, path: str) -> GrammarSource:
    if isinstance(schema, str):
        check_size(schema, path)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"{path} is no JSON: {error}", param=path) from None
    if not isinstance(schema, Mapping | bool):
        raise InvalidParameter(f"{path} must be a JSON schema, which is an object", param=path)
    check_document(schema, path)
    check_size(json.dumps(schema, ensure_ascii=False), path)
    return document_rule(schema, path)


def _from_object(given: object, path: str) -> GrammarSource:
    rule = _json_rule({"type": "object"}, whitespace_pattern=r"[\x20\x0A\x0D\x09]{1,8}")
    return GrammarSource(f"start: {rule}", path, document_rule({"type": "object"}, path).document)


def _text(given: object, path: str) -> str:
    if not isinstance(given, str) or not given:
        raise InvalidParameter(f"{path} must be a string, not empty", param=path)
    check_size(given, path)
    return given


def _from_regex(given: object, path: str) -> GrammarSource:
    text = _text(given, path)
    if reason := expression_fault(text, len(text.encode(errors="replace"))):
        raise InvalidParameter(f"{path} {reason}", param=path)
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", text, flags=re.DOTALL)
    return GrammarSource("start: /" + escaped.replace("\n", r"\n") + "/", path)


def _from_ebnf(given: object, path: str) -> GrammarSource:
    try:
        return GrammarSource(lark_of(_text(given, path)), path)
    except ValueError as error:
        raise InvalidParameter(f"{path}: {error}", param=path) from None


def _from_choice(given: object, path: str) -> GrammarSource:
    if isinstance(given, list):
        check_document(given, path)
    if (
        not isinstance(given, Sequence)
        or isinstance(given, str)
        or not given
        or not all(isinstance(one, str) and one for one in given)
    ):
        raise InvalidParameter(f"{path} must be a list of strings, none empty", param=path)
    texts = " | ".join(map(lark_string, dict.fromkeys(given)))
    check_size(texts, path)
    return GrammarSource(f"start: CHOICE\nCHOICE: {texts}", path)


_MAKERS: Mapping[str, Any] = {
    "json": _from_json,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_ebnf,
    "json_object": _from_object,
}
