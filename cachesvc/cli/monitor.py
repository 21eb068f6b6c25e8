"""`cachesvc monitor`: block events of the running server, as they come."""

import json as jsons
from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from typing import Annotated, Any

import typer

from api.format import size
from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import KEY_DIGITS, note
from tiers.telemetry.events import EventKind
from tiers.tier import TierName


def monitor(
    data_dir: DataDir = None,
    tier: Annotated[list[TierName] | None, typer.Option(help="Only this tier; repeatable")] = None,
    kind: Annotated[
        list[EventKind] | None, typer.Option(help="Only events of this kind; repeatable")
    ] = None,
    tokens: Annotated[bool, typer.Option(help="Print the blocks' token ids as well")] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="Stop after this many events")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line")] = False,
) -> None:
    """Print block events: stored, moved, removed, with tier, key, size and cause.

    Ends with the server or with Ctrl-C. The same stream is at GET /v1/cache/events.
    """
    server = running_server(data_dir)
    asked = [("tier", name) for name in tier or ()] + [("kind", name) for name in kind or ()]
    query = [*asked, ("tokens", "1" if tokens else None)]
    note(f"listening to {server.url}")
    for name, event in islice(server.follow("/admin/api/events", query), count):
        if name == "closing":
            note("the server stops")
            return
        if json:
            typer.echo(jsons.dumps({"event": name, **event}, ensure_ascii=False))
        elif name == "gap":
            note(f"{event['missed']} events were lost: this terminal reads too slowly")
        else:
            typer.echo(line(event))


def line(event: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(event["time_s"]).astimezone().strftime("%H:%M:%S.%f")[:-3]
    parts = [when, f"{event['kind']:<8}", f"{event['tier']:<7}"]
    if event["key"]:
        parts.append(event["key"][:KEY_DIGITS])
        is_first = event["parent"] == event["scope"]
        parent = "(root)" if is_first else (event["parent"] or "")[:KEY_DIGITS]
        parts.append(f"after {parent:<{KEY_DIGITS}}")
        parts.append(size(event["bytes"]))
    if event["source"]:
        parts.append(f"from {event['source']}")
    if event["cause"]:
        parts.append(f"for {event['cause']}")
    if event.get("token_ids"):
        parts.append(" ".join(map(str, event["token_ids"])))
    return "  ".join(parts)
