"""Answers under generated schemas are valid, as `jsonschema` judges them.

`SCHEMA_ANSWERS=2500 pytest tests/unit/test_schema_answers.py -s` runs more of them.
"""

import contextlib
import ipaddress
import json
import os
import random
import re
import uuid
from collections import Counter
from datetime import date, datetime
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import jsonschema
import pytest

from engine.errors import InvalidParameter
from engine.grammar.compiler import GrammarCompiler
from engine.structure import StructuredOutputs, source_of
from tests.support.walks import walk

NUM_ANSWERS = int(os.environ.get("SCHEMA_ANSWERS", "200"))
WORDS = [b"name", b'{"', b'": ', b'", "', b'"}', b"true", b", ", b"12", b"00", "é日".encode()]
TOKENS = [*(bytes([byte]) for byte in range(256)), b"", *WORDS]
FORMATS = jsonschema.FormatChecker(())
FORMATS.checks("ipv4", ValueError)(lambda text: bool(ipaddress.IPv4Address(text)) or True)
FORMATS.checks("ipv6", ValueError)(lambda text: bool(ipaddress.IPv6Address(text)) or True)
FORMATS.checks("uuid", ValueError)(lambda text: bool(uuid.UUID(text)) or True)
FORMATS.checks("date", ValueError)(lambda text: bool(date.fromisoformat(text)))
FORMATS.checks("date-time", ValueError)(lambda text: bool(datetime.fromisoformat(text)))
FORMATS.checks("email", ValueError)(lambda text: "@" in text)
LOCATED = re.compile("at #|Unsatisfiable|no answer|intersect|Unable to determine")
NAMES = ["a", "name", "full name", "日本", "é", 'q"uote', "😀", "b/c", "~"]
PATTERNS = ["^[a-c]+$", "b", r"^\d{2,3}-x$", "^(東京|大阪)$", "[aé]$", r"\.", "^a/b?$", "^x"]
SCALARS = [None, True, False, 0, 7, -3, 2.5, "a", "日本", "中国", "", 'q"\\\n', 1000000, 0.001]


class Schemas:
    """Random schemas of every keyword that is enforced."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.defs: dict[str, Any] = {}

    def root(self) -> dict[str, Any]:
        schema = self.any(3)
        if self.defs:
            schema = {"$defs": self.defs, **schema}
        return schema

    def any(self, depth: int) -> dict[str, Any]:
        kinds = ["string", "number", "integer", "enum", "const", "format", "types"]
        if depth > 0:
            kinds += ["object"] * 5 + ["array"] * 2 + ["anyOf", "allOf", "oneOf", "ref", "refs"]
        kind = self.chance.choice(kinds)
        return getattr(self, f"_{kind}")(depth)

    def _some(self, options: dict[str, Any], most: int = 3) -> dict[str, Any]:
        names = self.chance.sample(sorted(options), self.chance.randint(0, min(most, len(options))))
        return {name: options[name] for name in names}

    def _string(self, depth: int) -> dict[str, Any]:
        least = self.chance.randint(0, 4)
        options = {
            "minLength": least,
            "maxLength": least + self.chance.randint(0, 5),
            "pattern": self.chance.choice(PATTERNS),
        }
        return {"type": "string", **self._some(options)}

    def _format(self, depth: int) -> dict[str, Any]:
        formats = ["date", "date-time", "time", "ipv4", "ipv6", "uuid", "email", "hostname", "uri"]
        made = {"type": "string", "format": self.chance.choice(formats)}
        return made | self._some({"maxLength": 40, "pattern": "[12a]"}, 1)

    def _number(self, depth: int) -> dict[str, Any]:
        least = round(self.chance.uniform(-50, 50), self.chance.randint(0, 3))
        options = {
            "minimum": least,
            "exclusiveMinimum": least,
            "maximum": least + self.chance.choice([1, 10.5, 100]),
            "exclusiveMaximum": least + self.chance.choice([2, 10.25]),
            "multipleOf": self.chance.choice([0.5, 0.01, 3]),
        }
        return {"type": "number", **self._some(options, 2)}

    def _integer(self, depth: int) -> dict[str, Any]:
        least = self.chance.randint(-200, 200)
        options = {
            "minimum": least,
            "maximum": least + self.chance.randint(3, 500),
            "exclusiveMaximum": least + self.chance.randint(10, 50),
            "multipleOf": self.chance.choice([2, 3, 7]),
        }
        return {"type": "integer", **self._some(options, 2)}

    def _const(self, depth: int) -> dict[str, Any]:
        return {"const": self.chance.choice([*SCALARS, {"a": [1, "é"]}, [], ["x", 2]])}

    def _enum(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"enum": self.chance.sample([*SCALARS, {"a": 1}, [2]], 4)}
        return made | self._some({"type": self.chance.choice(["string", ["number", "null"]])})

    def _types(self, depth: int) -> dict[str, Any]:
        types = ["null", "boolean", "string", "integer", "number", "array", "object"]
        made: dict[str, Any] = {"type": self.chance.sample(types, self.chance.randint(1, 3))}
        return made | self._some({"minimum": 3, "minLength": 2, "maxItems": 1, "required": ["a"]})

    def _object(self, depth: int) -> dict[str, Any]:
        names = self.chance.sample(NAMES, self.chance.randint(0, 4))
        required = self.chance.sample(NAMES, self.chance.randint(0, 2))
        options = {
            "required": required + [name for name in names if self.chance.random() < 0.5],
            "additionalProperties": self.chance.choice([False, True, {"type": "integer"}]),
            "patternProperties": {"^x": self.any(depth - 1)},
            "minProperties": self.chance.randint(0, 3),
            "maxProperties": self.chance.randint(2, 5),
        }
        properties = {name: self.any(depth - 1) for name in names}
        return {"type": "object", "properties": properties, **self._some(options)}

    def _array(self, depth: int) -> dict[str, Any]:
        least = self.chance.randint(0, 2)
        options = {
            "items": self.any(depth - 1),
            "prefixItems": [self.any(depth - 1) for _ in range(2)],
            "minItems": least,
            "maxItems": least + self.chance.randint(0, 2),
        }
        return {"type": "array", **self._some(options)}

    def _anyOf(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth - 1) for _ in range(2)], **self._siblings(depth)}

    def _allOf(self, depth: int) -> dict[str, Any]:
        return {"allOf": [self._object(depth - 1), self._object(depth - 1)]}

    def _oneOf(self, depth: int) -> dict[str, Any]:
        tagged = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, kind: self.any(depth - 1)},
                "required": ["kind"],
            }
            for kind in ("one", "two")
        ]
        return {"oneOf": [*tagged, self.any(0)]}

    def _ref(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self.defs)}"
        self.defs[name] = {}
        self.defs[name] = self.any(depth - 1)
        return {"$ref": f"#/$defs/{name}", **self._siblings(depth)}

    def _refs(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self.defs)}"
        self.defs[name] = {
            "type": "object",
            "properties": {"value": {"type": "boolean"}, "next": {"$ref": f"#/$defs/{name}"}},
        }
        return {"$ref": f"#/$defs/{name}"}

    def _siblings(self, depth: int) -> dict[str, Any]:
        if self.chance.random() < 0.5:
            return {}
        return self.chance.choice([self._object(depth - 1), {"type": ["string", "object"]}])


@pytest.fixture
def compiler():
    made = GrammarCompiler(lambda: TOKENS, frozenset({256}), lambda text: text.encode())
    yield made
    made.close()


@pytest.mark.timeout(600)
def test_every_finished_answer_is_valid(compiler):
    told: Counter[str] = Counter()
    seed = 0
    while told["answers"] < NUM_ANSWERS:
        seed += 1
        schema = Schemas(seed).root()
        try:
            grammar = compiler.compile(source_of(StructuredOutputs(json=schema)))
        except InvalidParameter as error:
            told["refused"] += 1
            if not LOCATED.search(str(error)):
                told[str(error)[:100]] += 1
            continue
        told["schemas"] += 1
        for number in range(3):
            answer, _ = walk(grammar.begin(0), TOKENS, random.Random(f"{seed} {number}"))
            if answer is None:
                told["cut"] += 1
                continue
            told["answers"] += 1
            check(schema, answer, seed)
    print(dict(told))
    assert told["schemas"] > told["refused"]
    assert not [key for key in told if " " in key]


def check(schema: dict[str, Any], answer: bytes, seed: int) -> None:
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = jsonschema.Draft202012Validator(exact, format_checker=FORMATS)
    with localcontext(prec=1000), contextlib.suppress(InvalidOperation):  # of 1e9999 % 3
        document = json.loads(answer.decode(), parse_float=Decimal)
        errors = [error.message for error in validator.iter_errors(document)]
        assert not errors, (seed, schema, answer.decode(), errors)
