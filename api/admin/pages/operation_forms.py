"""Forms over operations, made from the signatures of `billing.operations`.

A page lists its forms: an operation, and labels for the arguments that it offers. What may be
typed, which choices there are, what must be given and what is said beside a field come from the
argument's annotation, as they do for the JSON routes. `data.form` in the templates shows a form.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import EnumType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from fastapi import Depends, Request
from starlette.datastructures import FormData

from api.admin.login.sessions import Admin
from api.admin.pages.forms import count_in, names_in, reason_in, seconds_in, tried
from api.errors import InvalidRequest
from billing.operations.arguments import Argument
from billing.operations.books import Books

MAX_TEXT = 500  # characters, of an argument without a bound of its own
UNLIMITED = "unlimited"  # typed for None, where that is not the default


async def _sent(request: Request) -> FormData:
    return await request.form()


Sent = Annotated[FormData, Depends(_sent)]


class FormField(NamedTuple):
    """How a form asks for an argument."""

    kind: Literal["text", "date", "days", "count", "choice", "several", "flag", "names", "counts"]
    read: Callable[[str], Any]  # what was typed, as the operation takes it
    choices: Mapping[str, str]  # the values, each with its words
    hint: str
    most: int  # characters
    required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationForm:
    """A form for one operation.

    `labels` are the arguments that it asks for, in its order. `choices` replaces the values of a
    choice and gives them words. `hints` replaces words that suit JSON only. `required` adds to what
    the signature requires.
    """

    operation: Callable[..., object]
    done: str  # the page says it afterwards
    button: str
    labels: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    @property
    def fields(self) -> dict[str, FormField]:
        hints = get_type_hints(self.operation, include_extras=True)
        return {name: self._field(name, hints[name]) for name in self.labels}

    def _field(self, name: str, annotation: Any) -> FormField:
        found = field_of(annotation)
        default = inspect.signature(self.operation).parameters[name].default
        required = name in self.required or default is inspect.Parameter.empty
        read = found.read
        inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
        if default is not None and type(None) in get_args(inner):

            def read(text: str) -> Any:
                return None if text.lower() == UNLIMITED else found.read(text)

        if name.endswith("_in_s"):
            found, read = found._replace(kind="days"), seconds_in
        return found._replace(
            kind="date" if name.endswith("_date") else found.kind,
            read=read,
            choices=self.choices.get(name, found.choices),
            hint=self.hints.get(name, found.hint),
            required=required,
        )

    def submit(
        self,
        request: Request,
        admin: Admin,
        sent: FormData,
        check: Callable[[Books, Mapping[str, Any]], None] = lambda *_: None,
        **known: str,
    ) -> tuple[str, Any]:
        """Carry the operation out. Returns the error's text, or "" and what the operation returned.
        Blocks.

        `known` are arguments that the page knows. `check` may refuse what was typed.
        """

        def change(books: Books) -> object:
            why, typed = reason_in(_text(sent, "why")), self.typed(sent)
            check(books, typed)
            takes = inspect.signature(self.operation).parameters
            given = typed | {name: value for name, value in known.items() if name in takes}
            return self.operation(books, **given, by=admin.name, why=why)

        return tried(request, change)

    def typed(self, sent: FormData) -> dict[str, Any]:
        """The arguments from a submitted form, without those left empty. Raises InvalidRequest."""
        found: dict[str, Any] = {}
        for name, asked in self.fields.items():
            if asked.kind == "flag":
                found[name] = name in sent
            elif asked.kind == "counts":
                found[name] = {
                    each: count_in(_text(sent, f"{name}.{each}")) for each in asked.choices
                }
            elif asked.kind == "several":
                texts = [str(each) for each in sent.getlist(name)]
                found[name] = [_checked(asked, self.labels[name], text) for text in texts]
            elif text := _text(sent, name):
                found[name] = _checked(asked, self.labels[name], text)
            elif asked.required:
                raise InvalidRequest(f"{self.labels[name]}: nothing was given or changed.")
        once = _text(sent, "once")  # the page has a new one each time it is shown,
        if once and "reference" in inspect.signature(self.operation).parameters:
            reference = f"{found.get('kind', self.operation.__name__)}_{once}"
            found = {"reference": reference} | found  # so a double click books once
        return found


def field_of(annotation: Any) -> FormField:
    """How a form asks for an argument of this annotation."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _with(field_of(parts[0]), parts[1])
    if isinstance(annotation, EnumType):
        values = {str(each): str(each) for each in annotation}  # type: ignore[var-annotated]
        return FormField("choice", annotation, values, "", MAX_TEXT, True)
    if origin is Literal:
        return FormField("choice", str, {each: each for each in parts}, "", MAX_TEXT, True)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return FormField("counts", str, {}, "", MAX_TEXT, True)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if isinstance(parts[0], EnumType):
            return field_of(parts[0])._replace(kind="several")
        return FormField("names", names_in, {}, "", MAX_TEXT, True)
    if parts:  # a union: its first part is what is typed
        return field_of(parts[0])
    if annotation is bool:
        return FormField("flag", bool, {}, "", MAX_TEXT, True)
    if annotation is int:
        return FormField("count", count_in, {}, "", MAX_TEXT, True)
    return FormField("text", str, {}, "", MAX_TEXT, True)


def _with(found: FormField, argument: Argument) -> FormField:
    """The same with an argument's words, and with its bound if that is of characters."""
    of_text = argument.max_length if found.kind == "text" else None
    return found._replace(hint=argument.description or found.hint, most=of_text or found.most)


def _checked(asked: FormField, label: str, text: str) -> Any:
    if len(text) > asked.most:
        raise InvalidRequest(f"{label}: at most {asked.most} characters. Nothing was changed.")
    if asked.kind in ("choice", "several") and text not in asked.choices:
        raise InvalidRequest(f"{label}: {text!r} is none of {', '.join(asked.choices)}.")
    return asked.read(text)


def _text(sent: FormData, name: str) -> str:
    value = sent.get(name, "")
    return value.strip() if isinstance(value, str) else ""
