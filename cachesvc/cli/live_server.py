"""Finds the running server for commands, or ends them with what to do."""

from pathlib import Path

from cachesvc.cli.options import existing_data_dir
from cachesvc.cli.render import fail
from cachesvc.server.server_file import LiveServer, find_server


def running_server(data_dir: Path | None) -> LiveServer:
    """The server on this data directory; ends the command if none is running."""
    path = existing_data_dir(data_dir)
    server = find_server(path)
    if server is None:
        fail(
            f"no server runs on {path}; start one with `cachesvc serve`, or name its directory "
            "with --data-dir"
        )
    return server
