"""The forms of the table of operations, made from its rows and the functions' signatures.

What may be typed, which choices there are, what must be given and what is said beside a field come
from the argument's annotation, as they do for the JSON routes. `data.form` in the templates shows
a form.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from functools import cached_property
from inspect import Parameter
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from fastapi import Depends, Request
from starlette.datastructures import FormData

from api.admin.login.sessions import Admin
from api.admin.parts import books_of
from api.admin.routes.operation_table import TABLE, Ask, Operation
from api.errors import ApiError, InvalidRequest
from billing.errors import BillingError
from billing.operations.arguments import Argument
from billing.operations.books import Books

MAX_TEXT = 500  # characters, of an argument without a bound of its own
UNLIMITED = "unlimited"  # typed for None, where that is not the default
Kind = Literal["text", "days", "hours", "choice", "several", "counts"]
# Arguments in seconds that are typed in another unit: its name, its seconds, and the most of it.
UNITS: Mapping[str, tuple[Kind, int, int]] = {
    "expires_in_s": ("days", 86_400, 3660),
    "for_s": ("hours", 3600, 24 * 366),
}


async def _sent(request: Request) -> FormData:
    return await request.form()


Sent = Annotated[FormData, Depends(_sent)]


class FormField(NamedTuple):
    """How a form asks for an argument."""

    kind: Kind
    read: Callable[[str], Any]  # what was typed, as the operation takes it
    choices: Mapping[str, str]  # the values, each with its words
    hint: str = ""
    most: int = MAX_TEXT  # characters
    required: bool = True
    label: str = ""


class OperationForm:
    """The form of one operation."""

    def __init__(self, row: Operation) -> None:
        assert row.form is not None, row
        self.function = row.function()
        self.name, self.button, self.done, self._asks = row.form

    @cached_property
    def fields(self) -> dict[str, FormField]:
        hints = get_type_hints(self.function, include_extras=True)
        return {name: self._field(name, ask, hints[name]) for name, ask in self._asks.items()}

    def _field(self, name: str, ask: Ask, annotation: Any) -> FormField:
        found = field_of(annotation)
        default = inspect.signature(self.function).parameters[name].default
        read = found.read
        inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
        if name in UNITS:
            found, read = found._replace(kind=UNITS[name][0]), _seconds_in(*UNITS[name])
        elif default is not None and type(None) in get_args(inner):

            def read(text: str) -> Any:
                return None if text.lower() == UNLIMITED else found.read(text)

        return found._replace(
            read=read,
            choices=found.choices if ask.choices is None else ask.choices,
            hint=found.hint if ask.hint is None else ask.hint,
            required=default is Parameter.empty,
            label=ask.label,
        )

    def submit(
        self,
        request: Request,
        admin: Admin,
        sent: FormData,
        check: Callable[[Books, Mapping[str, Any]], None] = lambda *_: None,
        **known: str,
    ) -> tuple[str, Any]:
        """Carry an operation on the books out. Returns the error's text, or "" and what the
        operation returned. Blocks.

        `known` are arguments that the page knows. `check` may refuse what was typed.
        """
        try:
            books, given = books_of(request), self.given(sent, **known)
            check(books, given)
            return "", self.function(books, **given, by=admin.name)
        except (ApiError, BillingError) as error:
            return str(error), None

    def given(self, sent: FormData, **known: str) -> dict[str, Any]:
        """All arguments but the caller: the page's, those typed, and why. Raises InvalidRequest."""
        takes = inspect.signature(self.function).parameters
        mine = {name: value for name, value in known.items() if name in takes}
        return {"why": reason_in(_text(sent, "why"))} | mine | self.typed(sent, mine)

    def typed(self, sent: FormData, known: Mapping[str, str] = {}) -> dict[str, Any]:
        """The arguments from a submitted form, without those left empty. Raises InvalidRequest."""
        found: dict[str, Any] = {}
        for name, asked in self.fields.items():
            if asked.kind == "counts":
                found[name] = {
                    each: _count_in(_text(sent, f"{name}.{each}")) for each in asked.choices
                }
            elif asked.kind == "several":
                found[name] = [_checked(asked, str(each)) for each in sent.getlist(name)]
            elif text := _text(sent, name):
                found[name] = _checked(asked, text)
            elif asked.required and name not in known:
                raise InvalidRequest(f"{asked.label}: nothing was given or changed.")
        once = _text(sent, "once")  # the page has a new one each time it is shown,
        if once and "reference" in inspect.signature(self.function).parameters:
            reference = f"{found.get('kind', self.function.__name__)}_{once}"
            found = {"reference": reference} | found  # so a double click books once
        return found


def field_of(annotation: Any) -> FormField:
    """How a form asks for an argument of this annotation."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _with(field_of(parts[0]), parts[1])
    if isinstance(annotation, EnumType):
        values = {str(each): str(each) for each in annotation}  # type: ignore[var-annotated]
        return FormField("choice", annotation, values)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return FormField("counts", str, {})
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return field_of(parts[0])._replace(kind="several")
    if parts:  # a union: its first part is what is typed
        return field_of(parts[0])
    return FormField("text", str, {})


def _with(found: FormField, argument: Argument) -> FormField:
    """The same with an argument's words, and with its bound if that is of characters."""
    of_text = argument.max_length if found.kind == "text" else None
    return found._replace(hint=argument.description or found.hint, most=of_text or found.most)


def _checked(asked: FormField, text: str) -> Any:
    if len(text) > asked.most:
        most = f"at most {asked.most} characters"
        raise InvalidRequest(f"{asked.label}: {most}. Nothing was changed.")
    if asked.kind in ("choice", "several") and text not in asked.choices:
        raise InvalidRequest(f"{asked.label}: {text!r} is none of {', '.join(asked.choices)}.")
    return asked.read(text)


def _text(sent: FormData, name: str) -> str:
    value = sent.get(name, "")
    return value.strip() if isinstance(value, str) else ""


def reason_in(why: str) -> str:
    """The reason for a change. Raises InvalidRequest if it is empty."""
    if not any(map(str.isalnum, why)):
        raise InvalidRequest("Say why; the audit log keeps it. Nothing was changed.")
    return why.strip()


def _seconds_in(unit: str, seconds: int, most: int) -> Callable[[str], int]:
    """Reads a number of this unit, above zero and at most so many, as seconds."""

    def read(text: str) -> int:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number <= most:
            raise InvalidRequest(f"{text!r} is not a number of {unit} from 0 to {most}")
        return round(number * seconds)

    return read


def _count_in(text: str) -> int | None:
    """A whole number; None for an empty field. Raises InvalidRequest for anything else."""
    typed = text.strip().replace(",", "").replace("\u202f", "").replace(" ", "")
    if not typed:
        return None
    if not (typed.isascii() and typed.isdigit()):
        raise InvalidRequest(f"{text.strip()!r} is not a whole number. Nothing was changed.")
    return int(typed)


FORMS: Final = {row.form.name: OperationForm(row) for row in TABLE if row.form is not None}
DONE: Final = {name: form.done for name, form in FORMS.items()}  # of a page's `done` in its address
