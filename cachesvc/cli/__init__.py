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
from cachesvc.cli.lazy import load as load_entry
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


def load(name: str) -> Any:
    return load_entry(name, COMMANDS[name])


REMOVED = {
    "budgets": "`cachesvc tenants budget`",
    "doctor": "`cachesvc serve` checks the machine first and names what to fix; where it runs, GET "
    "/health/ready says why it does not serve",
    "invoice": "the billing system that `cachesvc usage export` feeds issues invoices; "
    "`cachesvc usage` has its statements",
    "diff": "send both; `cachesvc explain ID` of the second names the token at which it diverges",
    "monitor": "block events are published at `events.zmq`, in vLLM's format; see docs/events.md",
    "latency": "`cachesvc top` and the dashboard show percentiles, GET /metrics has them",
}

# Options by command and name.
_BOOK_IT = "a tenant has one currency: convert the payment, then book it in that"
REMOVED_OPTIONS = {
    "bench ttft --output": "redirect the output of --json",
    "bench ttft --repeats": "each kind of hit is asked for five times; leave it out",
    "bench ttft --model": "set CACHESVC_MODEL__NAME instead",
    "bench ttft --device": "set CACHESVC_MODEL__DEVICE instead",
    "bench ttft --kv-dtype": "set CACHESVC_MODEL__KV_DTYPE instead",
    "bench ttft --block-size": "set CACHESVC_CACHE__BLOCK_SIZE instead",
    "cache tree --live": "it asks the running server, which has every tier; leave it out",
    "cache tree --children": "the server draws what fits; --depth and --tenant choose",
    "cache purge --database-url": "the running server purges, and has its ledger; leave it out",
    "cache purge --scope": "while no server runs, its data directory's disk folder may be removed",
    **dict.fromkeys(
        ("prices plan --out", "ledger correct --batch", "ledger correct --approve"),
        "give requests back one by one: `cachesvc ledger correct TENANT REQUEST --amount N`",
    ),
    "prices show --diff": "compare the cards' TOML files",
    "tenants budget --hard": "every budget refuses what would pass it; leave it out",
    **dict.fromkeys(
        ("tenants budget --ask", "tenants budget --most"),
        "Prometheus asks for top-ups: see TopUpWanted in ops/prometheus/rules.yml",
    ),
    "balance grant --for": "give a grant that any request spends, with --expires",
    "balance withdraw --currency": _BOOK_IT,
    **{
        f"balance topup --{name}": _BOOK_IT
        for name in ("currency", "rate", "rate-date", "rate-source")
    },
    "usage export --format": "a URL gets CloudEvents, a file FOCUS rows; leave it out",
    "replay --policy": "every tier evicts in LRU order; leave it out",
    **dict.fromkeys(
        ("replay --servers", "replay --shared"),
        "replay each server's own trace, with a shared store as its last of --tiers",
    ),
    **dict.fromkeys(
        ("replay --currency", "replay --hit-price", "replay --miss-price"),
        "multiply the tokens of --json by your card's prices",
    ),
    "replay --token-bytes": "multiply `written_blocks` of --json by the bytes of a block",
    "conform --offline": "start a server with small tiers, and give its URL: see docs/exactness.md",
    "conform --cold": "the ways of cachesvc, vLLM, SGLang and llama-server are known; leave it out",
    "conform --restart": "restart the server between two runs with one --seed",
    "conform --adapter": "serve it, and ask it by its name: `cachesvc conform URL --model NAME`",
    "conform --dtype": "set CACHESVC_MODEL__DTYPE instead",
    "conform --engine": "set CACHESVC_ENGINE__BACKEND instead",
    "conform --output": "redirect the output of --json",
    **{
        f"conform --{name}": "ask the server itself: `cachesvc conform URL`"
        for name in ("check", "public-key", "data-dir")
    },
    "usage export --reconcile": "compare `cachesvc usage --by day` with the service's sums by day",
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
    path = context.command_path.partition(" ")[2] if name and context else ""
    if instead := REMOVED_OPTIONS.get(f"{path} {name}"):
        error.message, error.possibilities = f"{name} was removed: {instead}", None


def _explain_removed_value(error: typer.BadParameter) -> None:
    """The same for a value that its option does not know."""
    from api.admin.routes.operation_table import REMOVED_VALUES

    option = error.param.opts[0].removeprefix("--") if error.param else ""
    value = error.message.split("'")[1] if error.message.startswith("'") else ""
    if instead := REMOVED_VALUES.get(option, {}).get(value):
        error.message = f"{value} was removed: {instead}"


app = lazy_group(
    COMMANDS,
    removed=REMOVED,
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
