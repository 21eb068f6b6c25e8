"""Finds the running server for commands, or ends them with what to do."""

from pathlib import Path

from cachesvc.cli.options import existing_data_dir
from cachesvc.cli.render import fail
from cachesvc.config.places import disk_path
from cachesvc.server.server_file import FILE_NAME, LiveServer, find_server
from tiers.disk.directory import is_locked, read_holder


def running_server(data_dir: Path | None) -> LiveServer:
    """The server on this data directory; ends the command if none is running."""
    path = existing_data_dir(data_dir)
    server = find_server(path)
    disk = disk_path(path)
    if server is None and is_locked(disk):
        fail(
            f"{path} is served by {read_holder(disk)}, which cannot be reached: it is still "
            f"starting, or its {FILE_NAME} was removed; restart it then"
        )
    if server is None:
        fail(
            f"no server runs on {path}; start one with `cachesvc serve`, or name its directory "
            "with --data-dir"
        )
    return server
