"""The command line: `cachesvc COMMAND`.

A command is imported when it is called, so `cachesvc --help` does not wait for torch.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted, 143 terminated before it served.
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
from api.format import plain
from cachesvc.cli.lazy import Command, LazyGroup, lazy_group
from cachesvc.cli.removed import instead_of
from cachesvc.cli.render import fail

INTERRUPTED = 130

COMMANDS = {
    "serve": Command("cachesvc.cli.serve:serve", "Serve a model over HTTP"),
    "node": Command("cachesvc.cli.node:node", "Keep KV blocks for the engines of this machine"),
    "top": Command("cachesvc.cli.top:top", "Watch the running server on one screen"),
    "explain": Command("cachesvc.cli.explain:explain", "Show why a prompt missed or would miss"),
    "cache": Command("cachesvc.cli.cache.app:app", "Inspect and maintain the disk tier"),
    "config": Command("cachesvc.cli.config:app", "Show every setting, its value and its origin"),
    "bench": Command("cachesvc.cli.bench:app", "Measure time to first token from each tier"),
    "conform": Command(
        "cachesvc.cli.conform:conform", "Check that a server's cache never changes an answer"
    ),
    "replay": Command(
        "cachesvc.cli.replay:replay", "Replay a trace of requests through tiers of any size"
    ),
    "usage": Command(
        "cachesvc.cli.money.usage:app", "Show tokens by class, their cost and the savings"
    ),
    "tenants": Command("cachesvc.cli.money.tenants:app", "Create, show and change tenants"),
    "keys": Command("cachesvc.cli.money.keys:app", "Create, list and revoke API keys"),
    "balance": Command("cachesvc.cli.money.balance:app", "Book money in and out"),
    "admin": Command("cachesvc.cli.admin:app", "Manage logins to the dashboard"),
    "prices": Command("cachesvc.cli.money.prices:app", "Show, check, plan and apply rate cards"),
    "ledger": Command("cachesvc.cli.money.ledger:app", "Prove, show and correct the ledger"),
}


# Errors of a file: wrong owner, a folder in its place or the reverse, a read-only file system.
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EROFS)
_FAILED = (errno.EIO, errno.EROFS)  # of a file system, which may name no file


class Root(LazyGroup):
    """Prints an error that a user can fix as one sentence, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = plain(error.message)  # typer reads values by pydantic
            _explain_removed_value(error)
            raise
        except Exception as error:
            _explain_removed(error)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                fail(f"a disk is full: {error}; free some space, then try again")
            if isinstance(error, OSError) and error.errno in _UNUSABLE and error.filename:
                path = error.filename2 or error.filename
                fail(f"{path} cannot be used: {error.strerror}; repair it, or move it away")
            if isinstance(error, OSError) and error.errno in _FAILED:
                fail(f"a disk failed: {error}; see the kernel's log, and repair its file system")
            if not isinstance(error, _user_errors()):
                raise
            fail(str(error), _exit_code(error))


def _explain_removed(error: Any) -> None:
    """Adds to the error of an unknown option, which typer does not export, what to use instead."""
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if name and context and (instead := instead_of(context, name)):
        error.message, error.possibilities = f"{name} was removed: {instead}", None
    if context and "extra argument" in str(error) and context.info_name == "explain":
        error.message = f"explain of two requests was removed: {instead_of(context.parent, 'diff')}"


def _explain_removed_value(error: typer.BadParameter) -> None:
    """The same for a value that its option does not know."""
    from api.admin.routes.operation_table import REMOVED_VALUES

    option = error.param.opts[0].removeprefix("--") if error.param else ""
    value = error.message.split("'")[1] if error.message.startswith("'") else ""
    if instead := REMOVED_VALUES.get(option, {}).get(value):
        error.message = f"{value} was removed: {instead}"


app = lazy_group(
    COMMANDS,
    of=Root,
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
    """The console script.

    The process ends right after an error is printed, or after Ctrl-C: at exit, torch's extension
    modules would add pages of reported leaks, and Python would wait for threads that load a model.
    """
    try:
        run()
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code in (1, INTERRUPTED) and "torch" in sys.modules:
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            leave(code)
        raise
    finally:
        _skip_last_collection()


def run() -> None:
    """Runs one command, in a process that may go on.

    Files are created for their owner only, even in a data directory that others can enter: the
    ledger, and the tokens and KV of prompts.
    """
    os.umask(0o077)
    # A container's first process ignores signals that it does not handle, and `serve` installs its
    # own handlers only when it serves.
    signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader closed the pipe
        sys.stderr.close()
        sys.exit(0)


def _skip_last_collection() -> None:
    """Skips the interpreter's garbage collection at exit, a third of a short command's time.

    Not with torch loaded: its extension modules would report everything not freed as leaked.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def _end(number: int, _: object) -> NoReturn:
    """Ends like the unhandled signal. An exception might be caught on its way."""
    os._exit(128 + number)


def _user_errors() -> tuple[type[Exception], ...]:
    from billing.errors import BillingError
    from cachesvc.config.errors import ConfigError
    from cachesvc.server.server_file import LiveError
    from engine.errors import EngineError
    from tiers.errors import TierError

    return (ConfigError, LiveError, TierError, EngineError, BillingError)


def _exit_code(error: Exception) -> int:
    """2 for an unknown option or an invalid value of one, also where the server finds it."""
    from billing.errors import InvalidAmount, InvalidLimit, InvalidName, InvalidSpan
    from cachesvc.config.errors import WrongOption
    from cachesvc.server.server_file import ServerFoundWrong

    values = (InvalidAmount, InvalidLimit, InvalidName, InvalidSpan)
    return 2 if isinstance(error, (WrongOption, ServerFoundWrong, *values)) else 1


def leave(code: int) -> NoReturn:
    """Ends the process without unloading modules. Extension modules would print leaks, and Python
    would destroy torch's modules object by object.

    After Ctrl-C that took a server 5.9 s instead of 0.7 s, on two busy cores (`py-spy dump
    --native` shows `gc_collect_main`).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
