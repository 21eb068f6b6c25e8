"""Sizes and durations as users write them: `64MiB`, `30s`. Pure."""

import re

_UNITS = {"B": 1} | {
    unit + suffix: base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, unit in enumerate("KMGT", start=1)
}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_size(text: str | int) -> int:
    """Bytes of `64MiB`, `1.5GB`, `4096` or an integer. Raises ValueError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(text), re.IGNORECASE | re.ASCII
    )
    number, unit = match.groups() if match else ("", "?")
    units = {name.lower(): size for name, size in _UNITS.items()}
    short = {name[0].lower(): size for name, size in _UNITS.items() if name.endswith("iB")}
    size = (units | short | {"": 1}).get(unit.lower())
    if size is None:
        raise ValueError(f"{text!r} is not a size; write it like 64MiB, 4GiB, 500MB or 4096")
    return int(float(number) * size)


def parse_duration(text: str | float) -> float:
    """Seconds of `250ms`, `30s`, `5m`, `2h`, `7d` or a number of seconds. Raises ValueError."""
    if isinstance(text, int | float):
        return float(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", str(text), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write it like 250ms, 30s, 5m, 2h or 7d")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def format_size(num_bytes: int) -> str:
    """The shortest exact form of a size, readable by `parse_size`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}"
    return f"{num_bytes}B"


def format_duration(seconds: float) -> str:
    """The shortest exact form of a duration, readable by `parse_duration`."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{seconds:.15g}s"
