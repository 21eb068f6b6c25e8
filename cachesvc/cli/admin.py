"""`cachesvc admin`: a way into the running server's dashboard that needs no key."""

from typing import Annotated

import typer

from api.admin.login.sessions import Role
from cachesvc.cli.lazy import Group
from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import AsJson, answer

app = typer.Typer(cls=Group, no_args_is_help=True, help="Log in to the dashboard")


@app.command()
def link(
    role: Annotated[
        Role, typer.Option("--role", help="An admin can change things, a reader can only look")
    ] = Role.ADMIN,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Print a link to the running server's dashboard that logs in once, within 15 minutes."""
    server = running_server(data_dir)
    made = server.post(f"/admin/api/links?role={role}")
    url = f"{server.url}{made['path']}"
    answer({"url": url, "ttl_s": made["ttl_s"]}, json, url)
