"""The JSON routes of the table of operations, made from its rows and the functions' signatures.

Functions on the books are plain: the server runs them on its thread pool, because they read and
write the ledger's database. Those on the cache run on the event loop. Every change leaves an audit
entry, on the books in its own transaction. Types of bodies are strict and unknown fields are
refused.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import EnumType
from functools import partial, reduce
from inspect import Parameter
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, field_validator
from starlette.responses import Response

from api.admin.access import Books, MayChange, MayRead, reader
from api.admin.routes.operation_table import PREFIX, REMOVED, REMOVED_VALUES, TABLE, Operation
from api.errors import NotServed

Name = Annotated[str, Field(min_length=1, max_length=64)]
_TAGS = {"cache": "cache", "prices": "prices", "usage": "ledger", "ledger": "ledger"}


class StrictBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class AdminBody(StrictBody):
    why: Annotated[str, Field(min_length=1, max_length=500, description="Kept in the audit log")]

    @field_validator("why")
    @classmethod
    def _says_something(cls, why: str) -> str:
        if not any(map(str.isalnum, why)):
            raise ValueError("say why; the audit log keeps it")
        return why.strip()


class CardSource(StrictBody):
    """A rate card: its TOML, or the name of a built-in or applied card."""

    toml: Annotated[str, Field(max_length=100_000)] | None = None
    name: Name | None = None
    version: Name | None = Field(None, description="Of a card that was applied")


# Arguments of operations that are mappings. Here they get their fields.
FIELDS: Mapping[str, type[BaseModel]] = {"card": CardSource}


def routes_of(kind: type[APIRoute]) -> APIRouter:
    """One route for each row of the table."""
    router = APIRouter(prefix=PREFIX, route_class=kind)
    for row in TABLE:
        router.add_api_route(
            row.path,
            _endpoint(row, row.function()),
            methods=[row.method],
            status_code=row.status,
            tags=[f"admin: {_TAGS.get(row.module, 'accounts')}"],
            dependencies=[Depends(reader)],
        )
    for name, instead in REMOVED.items():
        for path in (f"/{name}", f"/{name}/{{rest:path}}"):
            gone = _removed(f"{PREFIX}/{name} was removed: {instead}")
            router.add_api_route(path, gone, methods=["GET", "POST"], include_in_schema=False)
    return router


def _removed(message: str) -> Callable[..., None]:
    def refuse(_: MayRead) -> None:
        raise NotServed(message)

    return refuse


def _endpoint(row: Operation, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a route. FastAPI reads the parameters in its signature."""

    def endpoint(*, books: Any, **sent: Any) -> Any:
        made = function(books, **_given(**sent))
        return Response(made, media_type="text/csv") if isinstance(made, str) else made

    async def awaited(*, request: Request, **sent: Any) -> Any:
        return await function(request, **_given(**sent))

    hints = get_type_hints(function, include_extras=True)
    on, *arguments = [
        each.replace(annotation=hints.get(name))
        for name, each in inspect.signature(function).parameters.items()
        if name != "by"
    ]
    made: Any = endpoint if on.name == "books" else awaited
    place = Books if on.name == "books" else Request
    callers = [_parameter(on.name, place)]
    if "by" in hints:  # only an admin may call what takes a `why`
        callers.insert(0, _parameter("by", MayChange if "why" in hints else MayRead))
    made.__signature__ = inspect.Signature(
        [*callers, *_sent(row, arguments)], return_annotation=hints["return"]
    )
    made.__name__, made.__doc__ = function.__name__, function.__doc__
    return cast(Callable[..., Any], made)


def _given(by: Any = None, body: BaseModel | None = None, **given: Any) -> dict[str, Any]:
    """What the function is called with."""
    for name in type(body).model_fields if body is not None else ():
        value = getattr(body, name)
        given[name] = value.model_dump() if isinstance(value, CardSource) else value
    return given | ({"by": by.name} if by is not None else {})


def _sent(row: Operation, arguments: list[Parameter]) -> list[Parameter]:
    """The arguments in the path, in the query, and in the body."""
    in_path = [each for each in arguments if f"{{{each.name}}}" in row.path]
    others = [each for each in arguments if each not in in_path]
    found = [_parameter(each.name, _argument(each, Path)) for each in in_path]
    if row.method == "POST":
        return [*found, _parameter("body", _body(row, others))]
    return found + [_parameter(each.name, _argument(each, Query), each.default) for each in others]


def _body(row: Operation, arguments: list[Parameter]) -> type[BaseModel]:
    """The model of a POST's body, named for its operation."""
    fields: dict[str, Any] = {
        each.name: (
            FIELDS.get(each.name) or _argument(each, Field),
            ... if each.default is Parameter.empty else each.default,
        )
        for each in arguments
    }
    base = AdminBody if fields.pop("why", None) else StrictBody
    name = row.name.partition(".")[2].title().replace("_", "")
    return create_model(name, __base__=base, **fields) if fields else base


def _argument(each: Parameter, kind: Callable[..., Any]) -> Any:
    """The annotation for pydantic, which says of a removed value what to use instead."""
    wire, gone = _wire(each.annotation, kind), REMOVED_VALUES.get(each.name)
    return Annotated[wire, BeforeValidator(partial(_known, gone))] if gone else wire


def _known(gone: Mapping[str, str], value: Any) -> Any:
    if isinstance(value, str) and value in gone:
        raise ValueError(f"{value} was removed: {gone[value]}")
    return value


def _wire(annotation: Any, kind: Callable[..., Any]) -> Any:
    """The annotation for pydantic. `kind` takes what the outermost `Argument` says."""
    if get_origin(annotation) is Annotated:
        inner, argument = get_args(annotation)
        rules = {name: rule for name, rule in asdict(argument).items() if rule is not None}
        return Annotated[_within(inner), kind(**rules)]
    return Annotated[_within(annotation), kind()]


def _within(annotation: Any) -> Any:
    """The same with the arguments inside it, as in `Amount | None`."""
    if get_origin(annotation) is Annotated:
        return _wire(annotation, Field)
    if isinstance(annotation, EnumType):
        return Annotated[annotation, Field(strict=False)]
    parts = tuple(map(_within, get_args(annotation)))
    if not parts or get_origin(annotation) is Literal:
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return reduce(or_, parts)
    return get_origin(annotation)[parts]


def _parameter(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
