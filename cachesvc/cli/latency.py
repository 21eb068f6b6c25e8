"""`cachesvc latency`: what clients of the running server wait for, or what a probe waits for."""

import http.client
import itertools
import json as jsonlib
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

import typer

from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import (
    AsJson,
    fail,
    note,
    print_json,
    print_json_line,
    print_table,
    seconds,
)
from cachesvc.config import parse_duration
from cachesvc.observability.latency import NAMES
from cachesvc.server.server_file import LiveServer

SHARES = (50, 95, 99)
LABELS = {
    "ttft": "first token",
    "inter_token": "between tokens",
    "request": "whole request",
    "queue": "  in the queue",
    "load": "  loading the prefix",
    "prefill": "  prefill",
}


def latency(
    data_dir: DataDir = None,
    window: Annotated[
        str, typer.Option(help="Over how long, such as 1m or 1h; a week is kept")
    ] = "5m",
    probe: Annotated[
        bool, typer.Option(help="Send short requests of our own and time them, until interrupted")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Model to probe  [the first served]")] = None,
    key: Annotated[
        str | None, typer.Option(help="API key of the probes, where the server needs one")
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.01, help="Seconds between probes")
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="Stop after so many probes")
    ] = None,
    json: AsJson = False,
) -> None:
    """Percentiles of time to first token, between tokens and of requests, as clients had them.

    With --probe, like redis-cli --latency: one token of a short prompt, again and again. A probe is
    a request like any other, with a key of some tenant where keys are needed, and is billed.
    """
    server = running_server(data_dir)
    if probe:
        _probe(server, model, key, interval, count, json)
        return
    try:
        window_s = parse_duration(window)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--window") from None
    found = percentiles(server, window_s)
    if json:
        print_json({"window_s": window_s, "latency_s": found})
        return
    print_table(
        ("", *(f"p{share}" for share in SHARES)),
        [(LABELS[name], *map(_text, values.values())) for name, values in found.items()],
        right=[f"p{share}" for share in SHARES],
    )
    if all(value is None for value in found["request"].values()):
        note(f"no request ended in the last {seconds(window_s)}; --window looks further back")


def percentiles(server: LiveServer, window_s: float) -> dict[str, dict[str, float | None]]:
    """Seconds by name and percentile; None where nothing ended in the window."""
    names = {(name, share): f"p{share}:latency.{name}" for name in NAMES for share in SHARES}
    query = urlencode([("window_s", window_s), *(("over", each) for each in names.values())])
    told = server.get(f"/admin/api/history?{query}")["over"]
    return {name: {f"p{share}": told[names[name, share]] for share in SHARES} for name in NAMES}


def _probe(
    server: LiveServer,
    model: str | None,
    key: str | None,
    interval_s: float,
    count: int | None,
    json: bool,
) -> None:
    model = model or server.get("/admin/api/stats")["model"]
    taken: list[float] = []
    for turn in itertools.count():
        if turn == count:
            return
        if turn:
            time.sleep(interval_s)
        taken.append(_ask(server, model, key))
        told = summary(taken)
        if json:
            print_json_line({"seconds": round(taken[-1], 6), **told})
        else:
            typer.echo(
                f"{seconds(taken[-1]):>8}   of {len(taken)}: least {seconds(told['least_s'])}, "
                f"mean {seconds(told['mean_s'])}, most {seconds(told['most_s'])}"
            )


def summary(taken: Sequence[float]) -> dict[str, Any]:
    return {
        "count": len(taken),
        "least_s": round(min(taken), 6),
        "mean_s": round(sum(taken) / len(taken), 6),
        "most_s": round(max(taken), 6),
    }


def _ask(server: LiveServer, model: str, key: str | None) -> float:
    """Seconds from sending a prompt of one word to its first token."""
    body = {"model": model, "prompt": "ping", "max_tokens": 1, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    with closing(connection):
        try:
            started = time.perf_counter()
            connection.request("POST", "/v1/completions", jsonlib.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                fail(f"the probe was refused: {_reason(response.read())}")
            response.readline()
            return time.perf_counter() - started
        except (OSError, http.client.HTTPException) as error:
            fail(f"the server at {server.url} does not answer: {error}")


def _reason(body: bytes) -> str:
    try:
        told: Mapping[str, Any] = jsonlib.loads(body)
        return f"{told['error']['message']} (name a key with --key)"
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


def _text(value: float | None) -> str:
    return "-" if value is None else seconds(value)
