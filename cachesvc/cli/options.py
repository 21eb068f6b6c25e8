"""Options that several commands share."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from cachesvc.config.errors import ConfigError, WrongOption
from cachesvc.config.places import default_data_dir, has_other_variables
from cachesvc.config.quantities import parse_duration

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Data directory of the server  [default: ~/.local/share/cachesvc]",
        show_default=False,
    ),
]


def duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def named(option: str, given: Iterable[str], form: str) -> dict[str, str]:
    """Values by name, from `NAME=VALUE`. Raises WrongOption for anything else, with the form."""
    found: dict[str, str] = {}
    for one in given:
        name, _, value = one.partition("=")
        if not (name and value) or name in found:
            raise WrongOption(f"{option} {one}: write {form}, each name once")
        found[name] = value
    return found


def data_dir_of(data_dir: Path | None) -> Path:
    """The directory given, or that of the settings.

    Raises ConfigError for an unknown variable, which may be a misspelt name of the latter.
    """
    if data_dir is None and has_other_variables():
        from cachesvc.config.sources import check_environment  # which takes 0.1 s to import

        check_environment()
    return (data_dir or default_data_dir()).expanduser()


def existing_data_dir(data_dir: Path | None) -> Path:
    """The directory to read from. Raises ConfigError if it does not exist."""
    path = data_dir_of(data_dir)
    if not path.is_dir():
        raise ConfigError(f"there is no data directory {path}; check --data-dir")
    return path
