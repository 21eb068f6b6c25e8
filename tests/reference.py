"""Generates reference pages from code: settings, commands, metrics, errors and fields: `make docs`.

`tests/unit/test_docs.py` fails if a page in `docs/` is out of date.
"""

import sys
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from api.errors import TABLE, UNEXPECTED
from cachesvc.cli import COMMANDS
from cachesvc.cli.config import shown
from cachesvc.cli.lazy import LazyGroup, load
from cachesvc.config.settings import Settings, env_name, known_settings
from cachesvc.observability.table import METRICS
from tests.support.protocols import PROTOCOLS

SETTINGS_INTRO = """# Settings

Flags of `cachesvc serve` override the environment, the environment overrides the file given with
`--config` (or `CACHESVC_CONFIG`), and the file overrides the defaults. In the file, `server.port`
is the key `port` in the table `[server]`. Write sizes like `64MiB` or `4GiB`, and durations like
`30s` or `5m`. Settings with several values are tables in the file and JSON in the environment. An
unknown key stops the start, and the error names the nearest one. `cachesvc config show` prints the
value of each setting and its origin.
"""
COMMANDS_INTRO = """# Commands

Every command lists its options with `--help`. Commands that read print JSON with `--json`. Exit
codes are 0 for success, 1 for failure, 2 for a wrong command line, 130 if interrupted, and 143 if
terminated before it served. `cachesvc --install-completion` installs completion for your shell.
"""
METRICS_INTRO = """# Metrics

`GET /metrics` answers in Prometheus' text format, with base units and closed label sets. Compute
ratios in queries. Amounts of money are in 1e-12 of the currency unit. Load is told under vLLM's
names as well, for routers made for it; for its boards, use ours in `ops/grafana`.
"""
ERRORS_INTRO = """# Errors

Every refusal has the shape `{"error": {"message", "type", "param", "code"}}` that OpenAI's clients
expect. The message says what was wrong and what to do. The `openai` package raises its exception
for the same status.
"""


FIELDS_INTRO = """# Fields of a request

Every field that a protocol's body may have, and what this server does with it. Honoured: it has the
effect that its protocol documents, or the one in [the API page](api.md). Refused: any value other
than a neutral one is a 400 that names the field. Ignored: it changes no answer, for the reason
given. The header `X-Cachesvc-Ignored` of an answer names the fields of its request that were
ignored or unknown.
"""


def unescaped(help_text: str) -> str:
    """What `--help` shows of a help text of a loaded command."""
    return help_text.replace("\\[", "[")


def pages() -> dict[str, str]:
    """The text of each page by file name."""
    return {
        "settings.md": f"{SETTINGS_INTRO}\n{_settings()}",
        "commands.md": f"{COMMANDS_INTRO}\n{_commands()}",
        "metrics.md": f"{METRICS_INTRO}\n{_metrics()}",
        "errors.md": f"{ERRORS_INTRO}\n{_errors()}",
        "fields.md": f"{FIELDS_INTRO}\n{_fields()}",
    }


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _settings() -> str:
    defaults = Settings.model_validate({})
    rows = []
    for name, meaning in known_settings().items():
        value = shown(name, attrgetter(name)(defaults))
        value = "`~/.local/share/cachesvc`" if name == "server.data_dir" else f"`{value}`"
        rows.append((f"`{name}`", value, meaning, f"`{env_name(name)}`"))
    return table(("setting", "default", "meaning", "variable"), rows)


def _commands() -> str:
    return "\n".join(
        f"## cachesvc {path}\n\n{help_text}\n\n{options}"
        for name, entry in COMMANDS.items()
        for path, help_text, options in _command(name, load(name, entry))
    )


def _command(path: str, command: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(command, TyperGroup):
        if command.invoke_without_command:
            yield _section(path, command)
        for name, child in command.commands.items():
            loaded = command.load(name) if isinstance(command, LazyGroup) else child
            yield from _command(f"{path} {name}", loaded)
        return
    yield _section(path, command)


def _section(path: str, command: Any) -> tuple[str, str, str]:
    rows = [
        (", ".join(f"`{name}`" for name in _names(parameter)), unescaped(parameter.help or ""))
        for parameter in command.params
        if not getattr(parameter, "hidden", False)
    ]
    help_text = " ".join(unescaped(command.help or "").split())
    return path, help_text, table(("option", "meaning"), rows) if rows else ""


def _names(parameter: Any) -> list[str]:
    if parameter.param_type_name == "argument":
        return [parameter.name.upper()]
    return [*parameter.opts, *parameter.secondary_opts]


def _metrics() -> str:
    rows = [
        (f"`{name}`", row.kind, ", ".join(f"`{label}`" for label in row.labels), row.meaning)
        for name, row in METRICS.items()
    ]
    return table(("metric", "kind", "labels", "meaning"), rows)


def _fields() -> str:
    return "\n".join(
        f"## {protocol.name}\n\n`POST {protocol.path}`\n\n"
        + table(
            ("field", "handling", "why, or what to do instead"),
            [(f"`{name}`", str(handling), why) for name, handling, why in protocol.fields()],
        )
        for protocol in PROTOCOLS
    )


def _errors() -> str:
    rows = [
        (str(row.status), f"`{row.code}`", f"`{row.type}`", " ".join((error.__doc__ or "").split()))
        for error, row in TABLE.items()
    ]
    rows.append((str(UNEXPECTED.status), f"`{UNEXPECTED.code}`", f"`{UNEXPECTED.type}`", "A bug."))
    return table(("status", "code", "type", "when"), sorted(rows))


def write(folder: Path) -> None:
    """Write every page into `folder`."""
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
