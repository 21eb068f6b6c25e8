"""The command line: `cachesvc COMMAND`. Each command is imported when it is called, so that
`cachesvc --help` does not wait for torch.

Exit codes: 0 done, 1 it could not be done, 2 the command line was wrong, 130 interrupted,
143 terminated before it served.
"""

import importlib
import os
import signal
import sys
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

import cachesvc
from cachesvc.cli.render import fail


class Entry(NamedTuple):
    """Where a command lives, as `module:attribute` (a function or a `Typer`), and what it does."""

    target: str
    help: str


COMMANDS = {
    "serve": Entry("cachesvc.cli.serve:serve", "Serve a model over HTTP"),
    "top": Entry("cachesvc.cli.top:top", "Watch the running server on one screen"),
    "monitor": Entry("cachesvc.cli.monitor:monitor", "Print what happens to blocks as it happens"),
    "latency": Entry("cachesvc.cli.latency:latency", "Latencies of the running server, or probed"),
    "doctor": Entry("cachesvc.cli.doctor:doctor", "Check this machine and say what to fix"),
    "cache": Entry("cachesvc.cli.cache.app:app", "Look into the disk tier and maintain it"),
    "config": Entry("cachesvc.cli.config:app", "Show every setting, its value and its origin"),
    "bench": Entry("cachesvc.cli.bench:app", "Measure time to first token from each tier"),
    "replay": Entry("cachesvc.cli.replay:replay", "Replay a trace of requests through policies"),
    "usage": Entry(
        "cachesvc.cli.money.usage:app", "Tokens by class, what they cost and what hits saved"
    ),
    "tenants": Entry("cachesvc.cli.money.tenants:app", "Create and list tenants"),
    "keys": Entry("cachesvc.cli.money.keys:app", "Create, list and revoke API keys"),
    "balance": Entry("cachesvc.cli.money.balance:app", "Show, grant and top up balances"),
    "admin": Entry("cachesvc.cli.admin:app", "Let people into the dashboard"),
    "prices": Entry("cachesvc.cli.money.prices:app", "Lint, show, plan and apply rate cards"),
    "ledger": Entry("cachesvc.cli.money.ledger:app", "Verify the ledger"),
}


def load(name: str) -> Any:
    """The command itself, imported."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        outer = typer.Typer(add_completion=False)
        outer.add_typer(target, name=name)
        group = get_command(outer)
        assert isinstance(group, TyperGroup), group
        return group.commands[name]
    outer = typer.Typer(add_completion=False, rich_markup_mode="rich")
    outer.command(name)(target)
    return get_command(outer)


class Root(TyperGroup):
    """Knows each command by name and help, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS else stub, rest


app = typer.Typer(
    name="cachesvc",
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A context cache for LLM serving: tiered KV blocks, and a bill that can be proved.",
)


def _stub() -> None:
    """Stands for a command in the list of commands; `Root` calls the command itself."""


for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.help)(_stub)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cachesvc {cachesvc.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version"),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script. What a user can act on is told in a sentence, without a traceback.

    What it writes is its user's alone, in a data directory that others may enter too: the ledger,
    the tokens and the KV of prompts.
    """
    os.umask(0o077)
    # The first process of a container is not ended by a signal that it does not handle, and `serve`
    # handles its own only once it serves.
    signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if not isinstance(error, _user_errors()):
            raise
        fail(str(error))


def _end(number: int, _: object) -> NoReturn:
    """As the signal does where it is not handled; an exception could end in whatever catches it."""
    os._exit(128 + number)


def _user_errors() -> tuple[type[Exception], ...]:
    from billing.errors import BillingError
    from cachesvc.config import ConfigError
    from cachesvc.server.server_file import LiveError
    from engine.errors import EngineError
    from tiers.errors import TierError

    return (ConfigError, LiveError, TierError, EngineError, BillingError)
