"""JSON schemas that can be enforced. Every keyword is enforced, has no effect, or is refused.

`accept_schema` writes a schema anew with the enforced keywords alone, for llguidance, which would
ignore what it does not know. What llguidance enforces only in part, or only slowly, is refused
here. Pure, for any thread.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from engine.errors import InvalidParameter

MAX_PATTERN_BYTES = 4096  # of all expressions together; 20,000 of `a?` took 8 s to compile
MAX_PROPERTIES = 450  # of one object; the parser follows four items for each optional one
MAX_COUNTED = 20  # optional properties beside minProperties or maxProperties: 100 take 0.2 s
MAX_DOCUMENTS = 400  # lists and objects in one enum
MAX_MULTIPLE = 10_000  # without its decimal point; a multiple of 1,000,003 took 5 s
MAX_EXACT = 1 << 53  # integers beyond are not exact as floats

_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
_WITHOUT_EFFECT = {
    *("$schema", "$comment", "$defs", "definitions", "title", "description", "default"),
    *("example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
}
_HINTS = {
    "nullable": 'give "type" a list with "null"',
    "additionalItems": "give prefixItems, and items for the rest",
    "x-guidance": "the server sets it",
    "minProperties": "it counts beyond the required properties by more than one",
}
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:(?:[0-9]{{3}}[1-9]|[0-9]{{2}}[1-9]0|[0-9][1-9]00|[1-9]000)-{_DAY}|{_LEAP}-02-29)"
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]{1,6})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
# None: llguidance's own. Its dates allow 29 February in every year.
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    **dict.fromkeys(("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")),
}
_OBJECT = {"properties", "required", "additionalProperties", "patternProperties"}
# In a class, Rust's expressions read these as sets; JSON Schema's read them as characters.
_SETS = re.compile(r"(?<!\\)(?:\\\\)*\[\^?\]?(?:[^\]\\]|\\.)*?(\[|&&|--|~~)")


def accept_schema(schema: object, field: str) -> "Accepted":
    """Raises InvalidParameter with the keyword and its place for what cannot be enforced."""
    reader = Accepted(schema, field)
    reader.read_all()
    return reader


class Accepted:
    """A schema with nothing but enforced keywords, and where it has them.

    An object that names its properties and says nothing of others has no others. It stays open
    where schemas are combined, since another of them may name more.
    """

    def __init__(self, root: object, field: str) -> None:
        self.places: dict[str, str] = {}  # the first place of a keyword
        self.schema: Any = True
        self._root = root
        self._field = field
        self._combined = False
        self._objects: list[dict[str, Any]] = []  # that are closed unless schemas are combined
        self._definitions: dict[str, Any] = {}  # by the pointer of `$ref`
        self._names: dict[str, str] = {}
        self._pattern_bytes = 0

    def read_all(self) -> None:
        schema = self._read(self._root, "#")
        waiting = [pointer for pointer in self._names if pointer not in self._definitions]
        while waiting:
            for pointer in waiting:
                self._definitions[pointer] = self._read(self._resolved(pointer), pointer)
            waiting = [pointer for pointer in self._names if pointer not in self._definitions]
        for one in self._objects if not self._combined else ():
            one["additionalProperties"] = False
        named = {self._names[pointer]: one for pointer, one in self._definitions.items()}
        self.schema = {**schema, "$defs": named} if named else schema

    def _read(self, given: object, place: str) -> Any:
        if isinstance(given, bool):
            return {} if given else {"anyOf": []}
        if not isinstance(given, Mapping):
            raise self._refused(place, "must be a JSON schema, which is an object")
        made: dict[str, Any] = {}
        for keyword, value in given.items():
            where = f"{place}/{_escaped(keyword)}"
            if keyword in _WITHOUT_EFFECT or (keyword == "$id" and place == "#"):
                continue
            if keyword == "uniqueItems" and value is False:
                continue
            if keyword not in _READERS:
                if keyword.startswith("x-") and keyword != "x-guidance":
                    continue
                raise self._refused(where, f"{keyword!r} is not enforced here; leave it out")
            self.places.setdefault(keyword, where)
            made[keyword] = getattr(self, _READERS[keyword])(value, where)
        self._check(given, made, place)
        return made

    def _check(self, given: Mapping[str, Any], made: dict[str, Any], place: str) -> None:
        """What several keywords of one schema say together."""
        if (pattern := _FORMATS.get(made.get("format", ""))) is not None:
            del made["format"]
            made.setdefault("allOf", []).append({"pattern": pattern})
        names, required = made.get("properties", {}), made.get("required", [])
        extra = set(required) - set(names)
        least = made.get("minProperties", 0)
        if least > len(required) + 1:
            raise self._refused(f"{place}/minProperties", _HINTS["minProperties"])
        counted = "minProperties" in made or "maxProperties" in made
        if counted and len(names) - len(required) > MAX_COUNTED:
            raise self._refused(
                f"{place}/properties", f"has more than {MAX_COUNTED} optional ones to count"
            )
        self._combined |= "allOf" in given or "oneOf" in given
        self._combined |= bool({"$ref", "anyOf"} & set(made) and _OBJECT & set(made))
        if names and not extra and not least and "additionalProperties" not in made:
            self._objects.append(made)

    def _refused(self, where: str, reason: str) -> InvalidParameter:
        keyword = where.rpartition("/")[2]
        hint = f" ({_HINTS[keyword]})" if keyword in _HINTS and keyword not in reason else ""
        return InvalidParameter(
            f"{self._field} at {where[:200]}: {reason[:200]}{hint}", param=self._field
        )

    # One method for each kind of value.

    def _schema(self, value: object, where: str) -> Any:
        if isinstance(value, list):
            raise self._refused(where, "is a list; give prefixItems, and items for the rest")
        return self._read(value, where)

    def _schemas(self, value: object, where: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._refused(where, "must be a list of schemas, not empty")
        return [self._read(one, f"{where}/{number}") for number, one in enumerate(value)]

    def _properties(self, value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self._refused(where, "must be an object of schemas")
        if len(value) > MAX_PROPERTIES:
            raise self._refused(where, f"has more than {MAX_PROPERTIES} properties")
        return {name: self._read(one, f"{where}/{_escaped(name)}") for name, one in value.items()}

    def _pattern_properties(self, value: object, where: str) -> dict[str, Any]:
        made = self._properties(value, where)
        for pattern in made:
            self._pattern(pattern, where)
        return made

    def _pattern(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise self._refused(where, "must be a regular expression")
        self._pattern_bytes += len(value.encode())
        if reason := expression_fault(value, self._pattern_bytes):
            raise self._refused(where, reason)
        return value

    def _count(self, value: object, where: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_EXACT:
            raise self._refused(where, "must be a whole number, not negative")
        return value

    def _number(self, value: object, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refused(where, "must be a number")
        if not abs(value) < MAX_EXACT or abs(Decimal(str(value)).as_tuple().exponent) > 12:  # type: ignore[arg-type]
            raise self._refused(where, "has more digits than can be enforced")
        return value

    def _multiple(self, value: object, where: str) -> float:
        number = self._number(value, where)
        digits = int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)))
        if number <= 0 or digits > MAX_MULTIPLE or number > MAX_MULTIPLE:
            raise self._refused(where, f"must be above 0 and of digits up to {MAX_MULTIPLE}")
        return number

    def _format(self, value: object, where: str) -> str:
        if not isinstance(value, str) or value not in _FORMATS:
            raise self._refused(where, f"{value!r} is none of {', '.join(_FORMATS)}")
        return value

    def _type(self, value: object, where: str) -> object:
        types = value if isinstance(value, list) else [value]
        if not types or not all(isinstance(one, str) and one in _TYPES for one in types):
            raise self._refused(where, f"must be of {', '.join(sorted(_TYPES))}")
        return value

    def _required(self, value: object, where: str) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._refused(where, "must be a list of names")
        if len(value) > MAX_PROPERTIES:
            raise self._refused(where, f"has more than {MAX_PROPERTIES} names")
        return list(dict.fromkeys(value))

    def _enum(self, value: object, where: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._refused(where, "must be a list of values, not empty")
        if sum(isinstance(one, list | dict) for one in value) > MAX_DOCUMENTS:
            raise self._refused(where, f"has more than {MAX_DOCUMENTS} lists and objects")
        return [self._constant(one, where) for one in value]

    def _constant(self, value: Any, where: str) -> Any:
        if isinstance(value, list):
            return [self._constant(one, where) for one in value]
        if isinstance(value, Mapping):
            return {name: self._constant(one, where) for name, one in value.items()}
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._number(value, where)
        return value

    def _ref(self, value: object, where: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise self._refused(where, "must point into this schema, as #/$defs/name")
        self._resolved(value, where)
        name = self._names.setdefault(value, f"d{len(self._names)}")
        return f"#/$defs/{name}"

    def _resolved(self, pointer: str, where: str = "#") -> Any:
        found: Any = self._root
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            elif isinstance(found, Mapping) and step in found:
                found = found[step]
            else:
                raise self._refused(where, f"{pointer!r} leads to nothing in this schema")
        return found


def expression_fault(pattern: str, num_bytes: int) -> str | None:
    """Why an expression is refused before it is compiled, if it is."""
    if num_bytes > MAX_PATTERN_BYTES:
        return f"has regular expressions of more than {MAX_PATTERN_BYTES} bytes"
    if found := _SETS.search(pattern):
        return f"has {found[1]!r} in a character class; write a backslash before it"
    return None


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_READERS = {
    **dict.fromkeys(("items", "additionalProperties"), "_schema"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), "_schemas"),
    **{a + b: "_count" for a in ("min", "max") for b in ("Length", "Items", "Properties")},
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "_number"),
    **{key: f"_{key}" for key in ("properties", "pattern", "format", "type", "required", "enum")},
    "patternProperties": "_pattern_properties",
    "multipleOf": "_multiple",
    "const": "_constant",
    "$ref": "_ref",
}
