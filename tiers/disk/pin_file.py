"""Pins stored beside the disk tier, which survive restarts: one small JSON file, replaced
atomically.

Written by the mover's writer thread, read at start and by the command line.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from tiers.blocks.keys import PrefixKey
from tiers.disk.directory import replace_json
from tiers.errors import NotSaved
from tiers.policy.retention import Pin, PinKind

logger = logging.getLogger(__name__)

PINS_NAME = "pins.json"
DAMAGED_NAME = "pins.json.damaged"
FORMAT = 1
_UNREADABLE = (OSError, ValueError, KeyError, TypeError)
_NOT_IN_FORCE = "cannot be read and are not in force"


def save_pins(folder: Path, pins: Sequence[Pin[PrefixKey]]) -> None:
    """Replaces the file. Raises NotSaved if it cannot be written."""
    document = {"format": FORMAT, "pins": [pin_fields(pin) for pin in pins]}
    try:
        replace_json(folder / PINS_NAME, document)
    except OSError as error:
        raise NotSaved(f"the pins cannot be written: {error}") from error


def load_pins(folder: Path) -> list[Pin[PrefixKey]]:
    """The pins in the file. An unreadable file has none and is logged."""
    try:
        return _read(folder)
    except _UNREADABLE as error:
        logger.error(f"the pins in {folder / PINS_NAME} {_NOT_IN_FORCE}: {error!r}")
        return []


def set_damaged_aside(folder: Path) -> None:
    """Renames an unreadable file and logs it, because the next pin would overwrite it. For the
    holder of the folder's lock, before anyone loads the pins."""
    try:
        _read(folder)
    except _UNREADABLE as error:
        path = folder / PINS_NAME
        try:
            path.replace(folder / DAMAGED_NAME)
        except OSError:
            return  # the loader reports that it is unreadable
        logger.error(f"the pins in {path} {_NOT_IN_FORCE}: {error!r}; kept as {DAMAGED_NAME}")


def _read(folder: Path) -> list[Pin[PrefixKey]]:
    """The pins in the file. Raises the errors in `_UNREADABLE`."""
    try:
        payload = json.loads((folder / PINS_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    if payload["format"] != FORMAT:
        raise ValueError(f"format {payload['format']}, not {FORMAT}")
    return [pin_of(record) for record in payload["pins"]]


def pinned_keys(folder: Path) -> frozenset[PrefixKey]:
    """Every block under a recorded pin, including expired ones."""
    return frozenset(key for pin in load_pins(folder) for key in pin.keys)


def keys_in_force(folder: Path, now_s: float) -> list[PrefixKey]:
    """Every block under a pin in force, once, each prefix from its first block on."""
    pins = [pin for pin in load_pins(folder) if pin.until_s > now_s]
    return list(dict.fromkeys(key for pin in pins for key in pin.keys))


def pin_fields(pin: Pin[PrefixKey]) -> dict[str, object]:
    return {
        "name": pin.name,
        "scope": pin.scope.hex(),
        "keys": [key.hex() for key in pin.keys],
        "num_tokens": pin.num_tokens,
        "since_s": pin.since_s,
        "until_s": pin.until_s,
        "why": pin.why,
        "owner": pin.owner,
        "kind": str(pin.kind),
    }


def pin_of(record: dict[str, object]) -> Pin[PrefixKey]:
    """The inverse of `pin_fields`. Raises ValueError, KeyError and TypeError."""
    keys, tokens = record["keys"], record["num_tokens"]
    if not isinstance(keys, list) or not isinstance(tokens, int):
        raise TypeError(f"no pin: {record!r}")
    return Pin(
        name=str(record["name"]),
        keys=tuple(PrefixKey(bytes.fromhex(key)) for key in keys),
        until_s=float(str(record["until_s"])),
        since_s=float(str(record["since_s"])),
        scope=PrefixKey(bytes.fromhex(str(record["scope"]))),
        num_tokens=tokens,
        why=str(record["why"]),
        owner=str(record.get("owner", "")),
        kind=PinKind(str(record.get("kind", PinKind.OPERATOR))),
    )
