"""`cachesvc top`: a live view of the running server."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import fail


def top(
    data_dir: DataDir = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, help="Seconds between updates")
    ] = 1.0,
) -> None:
    """Watch the running server: queues, tiers, hit rates, latencies, tenants. Press ? for help.

    Needs a terminal; for scripts use `/admin/api/stats` or `/metrics`.
    """
    server = running_server(data_dir)
    if not sys.stdout.isatty() or Console().is_dumb_terminal:
        fail(
            "top needs a terminal that can draw; a script asks the server for /admin/api/stats "
            "or /metrics"
        )
    from cachesvc.top.app import TopApp
    from cachesvc.top.source import LiveSource

    TopApp(LiveSource(server), interval_s=interval).run()
