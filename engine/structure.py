"""The required form of an answer: structured output as a request states it.

`StructuredOutputs` is what a caller asks for. `GrammarSource` is the same in one checked form.
`Grammar` and `GrammarState` are what the engine needs of a compiled grammar (see
`engine.grammar.matcher`). Pure values and protocols, for any thread.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidParameter

MAX_SOURCE_BYTES = 64 * 1024  # of a schema, an expression or a grammar; compiling is slower
MAX_DEPTH = 100  # of nesting in a document; parsers and templates recurse
MAX_VALUES = MAX_SOURCE_BYTES  # in a document; each takes at least one byte


class SourceKind(StrEnum):
    """The languages a grammar may be written in."""

    JSON_SCHEMA = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The required form of the answer, under vLLM's names. Exactly one is set.

    `json` is a JSON schema, as an object or as text. `regex` must match the whole answer. `choice`
    lists the possible answers. `grammar` holds rules in xgrammar's EBNF with a rule `root`.
    `json_object` allows any JSON object.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar's text in one language. Equal sources are compiled once. `field` is the request's
    field that errors name."""

    kind: SourceKind
    text: str
    field: str = field(default="structured_outputs", compare=False)


class GrammarState(Protocol):
    """One sequence's position in its grammar. Engine thread only.

    Invariant: once `ready`, either `forced` names the tokens that must come next, or the model
    chooses among `allowed`. If neither holds, `stuck` says why no token can follow.
    """

    @property
    def ready(self) -> bool:
        """Whether the allowed tokens are known yet. Another process may be finding them."""
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

    def begin(self, min_tokens: int) -> GrammarState:
        """The state before the first token. While the grammar can continue, the end is not allowed
        before `min_tokens`."""
        ...


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
    _check_size(made.text, path)
    return made


def tagged_source(shape: Mapping[str, Any], field: str) -> GrammarSource:
    """A sequence of texts and schemas, as xgrammar's structural tags describe them. The server
    makes it for tool calls. Raises InvalidParameter if it is too large."""
    text = json.dumps({"type": "structural_tag", "format": shape}, ensure_ascii=False)
    _check_size(text, field)
    return GrammarSource(SourceKind.STRUCTURAL_TAG, text, field)


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


def _from_json(schema: object, path: str) -> GrammarSource:
    if isinstance(schema, str):
        _check_size(schema, path)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"{path} is no JSON: {error}", param=path) from None
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise InvalidParameter(f"{path} must be a JSON schema, which is an object", param=path)
    check_document(schema, path)
    # Properties are generated in this order, so keys are not sorted.
    return GrammarSource(SourceKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), path)


def _check_size(text: str, path: str) -> None:
    if len(text.encode("utf-8", errors="replace")) > MAX_SOURCE_BYTES:
        raise InvalidParameter(
            f"{path} is longer than {MAX_SOURCE_BYTES} bytes; give a smaller one", param=path
        )


def _from_text(kind: SourceKind, given: object, path: str) -> GrammarSource:
    if not isinstance(given, str) or not given:
        raise InvalidParameter(f"{path} must be a string, not empty", param=path)
    return GrammarSource(kind, given, path)


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
    rules = " | ".join(json.dumps(one, ensure_ascii=False) for one in dict.fromkeys(given))
    return GrammarSource(SourceKind.EBNF, f"root ::= {rules}", path)


_MAKERS: Mapping[str, Any] = {
    "json": _from_json,
    "regex": lambda given, path: _from_text(SourceKind.REGEX, given, path),
    "choice": _from_choice,
    "grammar": lambda given, path: _from_text(SourceKind.EBNF, given, path),
    "json_object": lambda given, path: GrammarSource(SourceKind.JSON_OBJECT, "{}", path),
}
