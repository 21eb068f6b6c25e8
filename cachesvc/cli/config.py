"""`cachesvc config show`: the effective value and origin of every setting."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, SecretStr

from cachesvc.cli.render import AsJson, print_json, print_table
from cachesvc.config.quantities import format_duration, format_size, parse_duration, parse_size
from cachesvc.config.settings import MODELS, env_name, parser_of
from cachesvc.config.sources import Setting, load_settings, without_passwords
from cachesvc.server.server_file import running_settings

app = typer.Typer(no_args_is_help=True, help="Show every setting, its value and its origin")


@app.callback()
def _group() -> None:
    pass


@app.command()
def show(
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML)")] = None,
    json: AsJson = False,
) -> None:
    """Print each setting that a start would use and its origin: default, file or environment.

    Where a server runs with another value, that value and its origin are shown too.
    """
    loaded = load_settings(config_file=config)
    rows = list(loaded.rows())
    running = running_settings(loaded.settings.server.data_dir)
    if json:
        print_json([_as_json(row) | _running(running.get(row.name)) for row in rows])
        return
    print_table(
        ("setting", "value", "origin", "meaning"),
        [
            (row.name, each, origin, row.help)
            for row in rows
            for each, origin in _values(row, running.get(row.name))
        ],
    )


def settings_by_name(rows: Iterable[Setting]) -> dict[str, tuple[str, str]]:
    return {row.name: (shown(row.name, row.value), row.origin) for row in rows}


def _values(row: Setting, running: tuple[str, str] | None) -> Iterator[tuple[str, str]]:
    value = shown(row.name, row.value)
    yield value, row.origin
    if running is not None and running[0] != value:
        yield running[0], f"the running server, {running[1]}"


def _running(found: tuple[str, str] | None) -> dict[str, Any]:
    return {"running": found and {"value": found[0], "origin": found[1]}}


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
    value = without_passwords(row.value) if isinstance(row.value, str) else row.value
    if row.name == MODELS:
        value = [each.model_dump(mode="json") for each in row.value]  # masks their keys
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, SecretStr):
        value = shown(row.name, value)
    return {
        "name": row.name,
        "value": value,
        "origin": row.origin,
        "env": env_name(row.name),
        "help": row.help,
    }
