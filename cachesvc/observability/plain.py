"""Snapshots as plain values: what JSON can say, and a flat list of their numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """`value` as dicts, lists, strings and numbers.

    A dataclass becomes a dict by field. A mapping keyed by tuples becomes dicts within dicts, so
    that `{("disk", "host"): 3}` is `{"disk": {"host": 3}}`.
    """
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return _nested(value)
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    return value.hex() if isinstance(value, bytes) else str(value)


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in nested dicts, by its path joined with dots; lists are passed over."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from numbers(each, f"{path}.{name}" if path else str(name))
    elif isinstance(value, int | float):
        yield path, float(value)


def _nested(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for key, value in mapping.items():
        *parents, last = key if isinstance(key, tuple) else (key,)
        place = told
        for parent in parents:
            place = place.setdefault(str(plain(parent)), {})
        place[str(plain(last))] = plain(value)
    return told
