"""`cachesvc conform`: checks from outside that a server's cache never changes an answer."""

import contextlib
import json as jsonlib
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cachesvc.cli.render import AsJson, fail, note, print_json, print_table, progress
from cachesvc.config.errors import ConfigError
from cachesvc.conform.offline import OwnServer, own_server
from cachesvc.conform.prompts import rounds
from cachesvc.conform.question import Question
from cachesvc.conform.report import Report
from cachesvc.conform.suite import Restarts, Suite
from cachesvc.conform.target import Target, TargetError, find_target

RESTART_S = 900.0
TIERS_OFFLINE = ("device", "host", "disk")


def conform(
    url: Annotated[str | None, typer.Argument(help="The server, such as http://HOST:PORT")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Start an own server to ask")] = False,
    model: Annotated[
        str | None, typer.Option(help="The model to ask; with --offline, the one to serve")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="CACHESVC_KEY", help="API key of the server")
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="Least number of comparisons")] = 1000,
    block: Annotated[int, typer.Option(min=2, help="Tokens in a block of the server")] = 64,
    longest: Annotated[int, typer.Option(min=8, help="Tokens of the longest shared prompt")] = 520,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer")] = 8,
    clients: Annotated[int, typer.Option(min=1, help="Requests at once, under load")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the prompts")] = 1,
    text: Annotated[bool, typer.Option("--text", help="Ask by text, not by token ids")] = False,
    bits: Annotated[
        bool, typer.Option("--bits", help="Log-probabilities must be equal too, to the last bit")
    ] = False,
    cold: Annotated[
        str | None,
        typer.Option(help="JSON that makes a request cold; {unique} in it is new each time"),
    ] = None,
    restart: Annotated[
        str | None, typer.Option(help="A command that restarts the server; it is asked again then")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="With --offline: NAME=SOURCE of an adapter, which is asked")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="With --offline: float32 or bfloat16")] = None,
    engine: Annotated[str | None, typer.Option(help="With --offline: embedded or vllm")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file")] = None,
    json: AsJson = False,
) -> None:
    """Ask a server the same questions cold and in every way that a cache may serve, and compare.

    Works with any OpenAI-compatible server of POST /v1/completions. Exit code 1 if an answer
    differs.
    """
    if (url is None) is not offline:
        raise ConfigError("give either the URL of a server, or --offline")
    options = {"--model": model, "--adapter": adapter, "--dtype": dtype, "--engine": engine}
    asked_model = (adapter or "").partition("=")[0] or (None if offline else model)
    if engine == "vllm":  # which refuses a context longer than its cache
        options |= {"--vllm.max-model-len": str(longest + 2 * block + max_tokens)}
        options |= {"--vllm.block-size": str(block)}
    else:
        options |= {"--block-size": str(block)}
    try:
        with (
            _stopped_by_signals(),
            _target(url, asked_model, key, _read_cold(cold), options, restart) as (target, again),
        ):
            if target.cold is None:
                note(
                    f"nothing is known that makes a request to {target.owner or 'this server'} "
                    "cold; each prompt's first answer is compared with (see --cold)"
                )
            asked = rounds(
                block=block, max_tokens=max_tokens, seed=seed, longest=longest, as_text=text
            )
            suite = Suite(target, asked, clients=clients, seed=seed)
            report = _run(suite, Report(block), cases, again)
    except TargetError as error:
        fail(str(error))
    # vLLM's own cache may be as large as its GPU, so that nothing below it is asked.
    due = TIERS_OFFLINE if offline and engine != "vllm" else ()
    faults = report.faults(bits=bits, tiers=due)
    document = _document(report, target, suite, faults)
    if output is not None:
        output.write_text(jsonlib.dumps(document, indent=1) + "\n")
    if json:
        print_json(document)
    else:
        _print(report, faults)
    if faults:
        raise typer.Exit(1)


@contextlib.contextmanager
def _target(
    url: str | None,
    model: str | None,
    key: str | None,
    cold: dict[str, Any] | None,
    options: dict[str, str | None],
    restart: str | None,
) -> Iterator[tuple[Target, Restarts | None]]:
    """The server to ask, and what restarts it if that is possible."""
    if url is not None:
        target = find_target(url, model=model, key=key, cold=cold)
        yield target, None if restart is None else Restarts(lambda: _restart(restart, target))
        return
    given = [part for name, value in options.items() if value for part in (name, value)]
    with own_server(given) as server:
        target = find_target(server.url, model=model, key=None, cold=cold)
        yield target, _restarts(server, target)


def _restarts(server: OwnServer, target: Target) -> Restarts:
    def again(*more: str) -> None:
        server.restart(*more)
        target.url = server.url

    def as_other_dtype(questions: Sequence[Question]) -> None:
        again("--dtype", other, "--kv-dtype", kept)
        for question in questions:
            target.ask(question)
        again()

    served = target.serves or {}
    kept = served.get("kv_dtype", "")
    other = "float32" if served.get("dtype") != "float32" else "bfloat16"
    own = served.get("engine") == "embedded"  # vLLM stores KV in the model's dtype
    return Restarts(again, as_other_dtype if own else None)


def _restart(command: str, target: Target) -> None:
    """Run the command, then wait until the server answers. Raises TargetError."""
    done = subprocess.run(shlex.split(command), check=False)
    if done.returncode:
        raise TargetError(f"the command for a restart ended with {done.returncode}: {command}")
    give_up = time.monotonic() + RESTART_S
    while True:
        try:
            find_target(target.url, model=target.model, key=target.key, cold=target.cold)
            return
        except TargetError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.5)


def _run(suite: Suite, report: Report, cases: int, restarts: Restarts | None) -> Report:
    """A server that fails on the way ends the run, and so does a signal; what was found until then
    is reported."""
    with progress("comparing answers", cases) as step:
        try:
            with contextlib.closing(suite.run(cases, restarts)) as checks:
                for check in checks:
                    report.add(check)
                    step(1)
        except TargetError as error:
            if not report.cases:
                raise
            report.ended = str(error)
        except KeyboardInterrupt:
            report.ended = "it was interrupted"
    return report


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt here, as Ctrl-C does, so that an own server is stopped."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_cold(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        cold = jsonlib.loads(text)
    except ValueError as error:
        raise ConfigError(f"--cold is not JSON: {error}") from error
    if not isinstance(cold, dict):
        raise ConfigError('--cold is a JSON object, such as {"cache_salt": "{unique}"}')
    return cold


def _document(report: Report, target: Target, suite: Suite, faults: list[str]) -> dict[str, Any]:
    return {
        "server": target.owner,
        "model": target.model,
        "cold_known": target.cold is not None,
        "cold_answers": suite.num_cold,
        "serves": target.serves,
        **report.as_json(),
        "faults": faults,
    }


def _print(report: Report, faults: list[str]) -> None:
    rows = [
        (kind, num, report.flips[kind], report.moves[kind]) for kind, num in report.cases.items()
    ]
    total = ("all", report.cases.total(), report.num_flips, report.moves.total())
    names = ("kind", "cases", "flips", "moved")
    print_table(names, [*rows, total], right=names[1:])
    if report.served:
        served = ", ".join(f"{num:,} from {tier}" for tier, num in report.served.items())
        typer.echo(f"prompt tokens served: {served}")
    if report.num_compared:
        typer.echo(f"largest change of a log-probability: {report.moved:.2g}")
    for line in report.flip_lines():
        typer.echo(line)
    typer.echo("; ".join(faults) if faults else "conforms: no answer differs from the cold one")
