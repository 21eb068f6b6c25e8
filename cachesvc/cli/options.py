"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cachesvc.config.errors import ConfigError
from cachesvc.config.places import default_data_dir
from cachesvc.config.quantities import parse_duration, parse_size

Value = TypeVar("Value")

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Data directory of the server  [default: ~/.local/share/cachesvc]",
        show_default=False,
    ),
]


def duration(text: str) -> float:
    """Parses an option like 12h or 7d."""
    return _parsed(parse_duration, text)


def size(text: str) -> int:
    """Parses an option like 4GiB."""
    return _parsed(parse_size, text)


def _parsed(parse: Callable[[str], Value], text: str) -> Value:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def existing_data_dir(data_dir: Path | None) -> Path:
    """The directory to read from. Raises ConfigError if it does not exist."""
    path = (data_dir or default_data_dir()).expanduser()
    if not path.is_dir():
        raise ConfigError(f"there is no data directory {path}; check --data-dir")
    return path
