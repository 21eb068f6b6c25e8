"""`cachesvc config show`: the effective value and origin of every setting."""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from cachesvc.cli.render import AsJson, print_json, print_table
from cachesvc.config.quantities import format_duration, format_size, parse_duration, parse_size
from cachesvc.config.settings import MODELS, env_name, parser_of
from cachesvc.config.sources import Setting, load_settings, without_passwords

app = typer.Typer(no_args_is_help=True, help="Show every setting, its value and its origin")


@app.command()
def show(
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML)")] = None,
    json: AsJson = False,
) -> None:
    """Print each setting that a start would use and its origin: default, file or environment.

    What a server runs with is in its log: it names the settings that are not the default.
    """
    rows = list(load_settings(config_file=config).rows())
    if json:
        print_json([_as_json(row) for row in rows])
        return
    print_table(
        ("setting", "value", "origin", "meaning"),
        [(row.name, shown(row.name, row.value), row.origin, row.help) for row in rows],
    )


def shown(name: str, value: Any) -> str:
    """A value as a user writes it, with passwords in URLs masked; `-` where there is none."""
    if value is None:
        return "-"
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if name == MODELS and isinstance(value, list):
        return "; ".join(shown(name, each) for each in value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{key}={shown(name, each)}" for key, each in value.items()) or "-"
    if isinstance(value, bool):
        return str(value).lower()
    parser = parser_of(name)
    if parser is parse_size:
        return format_size(value)
    if parser is parse_duration:
        return format_duration(value)
    if isinstance(value, float):
        return f"{value:g}"
    return without_passwords(str(value)) or "-"


def _as_json(row: Setting) -> dict[str, Any]:
    value = to_jsonable_python(row.value)  # masks keys
    return {
        "name": row.name,
        "value": without_passwords(value) if isinstance(value, str) else value,
        "origin": row.origin,
        "env": env_name(row.name),
        "help": row.help,
    }
