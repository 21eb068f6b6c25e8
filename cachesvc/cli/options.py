"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from cachesvc.config.errors import ConfigError
from cachesvc.config.places import default_data_dir

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Data directory of the server  [default: ~/.local/share/cachesvc]",
        show_default=False,
    ),
]


def existing_data_dir(data_dir: Path | None) -> Path:
    """The directory to read from. Raises ConfigError where there is none."""
    path = (data_dir or default_data_dir()).expanduser()
    if not path.is_dir():
        raise ConfigError(f"there is no data directory {path}; check --data-dir")
    return path
