"""Request bodies: strict and bounded. A refusal names the wrong field.

Bodies are untrusted and are checked on the event loop. So no list is read beyond its bound or its
first wrong item: pydantic's report on eight million items took two minutes.
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from api.errors import InvalidRequest, NotJson
from api.format import plain

MESSAGES_MAX = 10_000
ITEMS_MAX = 1_024  # of tools, calls, parts, contents, stop token ids

_PLAIN = {
    "dict_type": "should be an object",
    "list_type": "should be an array",
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
}

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(max_length=ITEMS_MAX, fail_fast=True)]


class Body(BaseModel):
    """Strict types, unknown fields accepted."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


BodyType = TypeVar("BodyType", bound=Body)


def parse(raw: bytes, kind: type[BodyType]) -> BodyType:
    """`raw` as a `kind`. Raises NotJson or InvalidRequest, without text from the request."""
    return checked(document_in(raw), kind)


def document_in(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises NotJson."""
    try:
        document = _loaded(raw)
    except orjson.JSONDecodeError as error:
        raise NotJson(
            f"The body is not valid JSON ({error.msg} at line {error.lineno}, column "
            f"{error.colno}); send one JSON object in UTF-8."
        ) from None
    if not isinstance(document, dict):
        raise NotJson(f"The body is a JSON {_json_name(document)}; send one JSON object.")
    return document


def checked(document: Mapping[str, Any], kind: type[BodyType]) -> BodyType:
    """Raises InvalidRequest, by field."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False, include_context=False)) from None


def _loaded(raw: bytes) -> object:
    """The parsed JSON.

    Garbage collection is off meanwhile: it would walk every new object of a large body again and
    again. 16 MiB of brackets would take 4 s instead of 1 s.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(raw)
    finally:
        if paused:
            gc.enable()


def refusal(found: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The first error, in OpenAI's wording: the path of the field and what it should be.

    `found` are pydantic's errors.
    """
    first = _deepest(found)
    path = _path(first["loc"])
    message = _PLAIN.get(first["type"]) or plain(first["msg"])
    if first["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"Unknown parameter: '{path}'.", param=path)
    got = _shown(first["input"])
    return InvalidRequest(f"Invalid '{path}': {message}; got {got}.", param=path)


def _deepest(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The most specific error: of a union's branches, the one that got furthest into the value."""
    field = found[0]["loc"][0]
    return max(
        (one for one in found if one["loc"][0] == field),
        key=lambda one: (len(one["loc"]), one["type"] == "too_long"),
    )


def _path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') as messages[0].role, without pydantic's names of union branches."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in {"str", "int"}:
            path += f".{part}" if path else part
    return path


def _shown(value: object) -> str:
    """A value as errors and logs may show it: numbers and single words, never a text."""
    if value is None or isinstance(value, bool | float):
        return orjson.dumps(value).decode()
    if isinstance(value, int) and abs(value) < 1 << 64:
        return str(value)
    if isinstance(value, str) and len(value) <= 24 and value.isidentifier():
        return f"'{value}'"
    return f"a JSON {_json_name(value)}"


def _json_name(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
