"""The command line: `cachesvc COMMAND`. Each command is imported when it is called, so that
`cachesvc --help` does not wait for torch.

Exit codes: 0 done, 1 it could not be done, 2 the command line was wrong, 130 interrupted,
143 terminated before it served.
"""

import errno
import gc
import logging
import os
import signal
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer

import cachesvc
from cachesvc.cli.lazy import Command, lazy_group
from cachesvc.cli.lazy import load as load_entry
from cachesvc.cli.render import fail

COMMANDS = {
    "serve": Command("cachesvc.cli.serve:serve", "Serve a model over HTTP"),
    "node": Command("cachesvc.cli.node:node", "Keep KV blocks for the engines of this machine"),
    "top": Command("cachesvc.cli.top:top", "Watch the running server on one screen"),
    "monitor": Command("cachesvc.cli.monitor:monitor", "Print block events as they happen"),
    "explain": Command("cachesvc.cli.explain:explain", "Show why a prompt missed or would miss"),
    "doctor": Command("cachesvc.cli.doctor:doctor", "Check this machine and say what to fix"),
    "cache": Command("cachesvc.cli.cache.app:app", "Inspect and maintain the disk tier"),
    "config": Command("cachesvc.cli.config:app", "Show every setting, its value and its origin"),
    "bench": Command("cachesvc.cli.bench:app", "Measure time to first token from each tier"),
    "replay": Command("cachesvc.cli.replay:replay", "Replay a trace of requests through policies"),
    "usage": Command(
        "cachesvc.cli.money.usage:app", "Show tokens by class, their cost and the savings"
    ),
    "tenants": Command("cachesvc.cli.money.tenants:app", "Create, show and change tenants"),
    "keys": Command("cachesvc.cli.money.keys:app", "Create, list and revoke API keys"),
    "balance": Command("cachesvc.cli.money.balance:app", "Book money in and out"),
    "invoice": Command("cachesvc.cli.money.invoice:app", "Issue invoices and credit notes"),
    "admin": Command("cachesvc.cli.admin:app", "Manage logins to the dashboard"),
    "prices": Command("cachesvc.cli.money.prices:app", "Show, check, plan and apply rate cards"),
    "ledger": Command("cachesvc.cli.money.ledger:app", "Prove, show and correct the ledger"),
}


def load(name: str) -> Any:
    """The command itself, imported."""
    return load_entry(name, COMMANDS[name])


REMOVED = {
    "budgets": "`cachesvc tenants budget`",
    "diff": "`cachesvc explain`, with two requests",
    "latency": "`cachesvc top` and the dashboard show percentiles, GET /metrics has them",
}

# Of a file: not this user's, a folder in its place or the reverse, or a file system to read only.
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EROFS)

app = lazy_group(
    COMMANDS,
    removed=REMOVED,
    name="cachesvc",
    pretty_exceptions_enable=False,
    help="A context cache for LLM serving: KV blocks in tiers, and a bill that can be proved.",
)


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
    """The console script. What is printed of an error is the last word: Python taking torch apart
    would add pages about what its extension modules leak.
    """
    try:
        run()
    except BaseException as error:
        failed = not isinstance(error, SystemExit) or error.code == 1
        if failed and "torch" in sys.modules:
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            _leave(1)
        raise
    finally:
        _skip_last_collection()


def run() -> None:
    """One command, in a process that may go on. An error that a user can act on is one sentence,
    without a traceback.

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
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            fail(f"a disk is full: {error}; free some space, then try again")
        if isinstance(error, OSError) and error.errno in _UNUSABLE and error.filename is not None:
            path = error.filename2 or error.filename
            fail(f"{path} cannot be used: {error.strerror}; repair it, or move it away")
        if not isinstance(error, _user_errors()):
            raise
        fail(str(error))


def _skip_last_collection() -> None:
    """The interpreter collects garbage as it ends, which takes a third of a short command's time.

    Not beside torch: its extension modules would report all that was not freed as leaked.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def _leave(code: int) -> NoReturn:
    """End without taking modules apart, which prints what extension modules leak."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(number: int, _: object) -> NoReturn:
    """As the signal does where it is not handled; an exception could end in whatever catches it."""
    os._exit(128 + number)


def _user_errors() -> tuple[type[Exception], ...]:
    from billing.errors import BillingError
    from cachesvc.config.errors import ConfigError
    from cachesvc.server.server_file import LiveError
    from engine.errors import EngineError
    from tiers.errors import TierError

    return (ConfigError, LiveError, TierError, EngineError, BillingError)
