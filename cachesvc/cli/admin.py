"""`cachesvc admin`: who may log in to the dashboard of a data directory's server."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from api.admin.login.passwords import Passwords
from api.admin.login.sessions import Role
from api.errors import ApiError
from cachesvc.cli.lazy import without
from cachesvc.cli.live_server import running_server
from cachesvc.cli.money.books import NO_REASON, DatabaseUrl, Reason, books
from cachesvc.cli.options import DataDir, data_dir_of, existing_data_dir
from cachesvc.cli.render import AsJson, answer, fail, note, print_documents
from cachesvc.server.server_file import actor, find_server

_REMOVED = {
    "list": "`cachesvc admin password --list`",
    "remove": "`cachesvc admin password NAME --remove`",
}

app = typer.Typer(
    cls=without(_REMOVED), no_args_is_help=True, help="Manage logins to the dashboard"
)

Name = Annotated[str, typer.Argument(help="Name to log in with")]
RoleOption = Annotated[
    Role, typer.Option("--role", help="An admin can change things, a reader can only look")
]


@app.command()
def link(role: RoleOption = Role.ADMIN, data_dir: DataDir = None, json: AsJson = False) -> None:
    """Print a link to the running server's dashboard that logs in once, within 15 minutes."""
    server = running_server(data_dir)
    made = server.post(f"/admin/api/links?role={role}")
    url = f"{server.url}{made['path']}"
    answer({"url": url, "ttl_s": made["ttl_s"]}, json, url)


@app.command()
def password(
    name: Name = "admin",
    role: RoleOption = Role.ADMIN,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the password")] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="Only list the names that have a password")
    ] = False,
    reason: Reason = NO_REASON,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Set the password of a new or existing admin, typed here or read from standard input.

    It takes effect at once, and the admin's open sessions end. Keys with the admin scope can log in
    as well.
    """
    try:
        if list_:
            _list(data_dir, json)
        elif remove:
            _remove(name, reason, data_dir, database)
        else:
            _set(name, role, reason, data_dir, database)
    except ApiError as error:
        fail(str(error))


def _set(name: str, role: Role, reason: str, data_dir: Path | None, database: str | None) -> None:
    path = data_dir_of(data_dir)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with books(path, database, create=True) as open_books:
        Passwords(path).set(name, _ask(), role)
        open_books.accounts.trail.record(
            "admin.password", name, by=actor(), after={"role": role}, reason=reason
        )
    _end_sessions(path, name)
    note(f"{name} may log in as {role}")


def _list(data_dir: Path | None, json: bool) -> None:
    roles = Passwords(existing_data_dir(data_dir)).roles()
    found = [{"name": name, "role": str(role)} for name, role in roles.items()]
    print_documents(found, json, ("name", "role"))


def _remove(name: str, reason: str, data_dir: Path | None, database: str | None) -> None:
    path = existing_data_dir(data_dir)
    with books(path, database) as open_books:
        if not Passwords(path).remove(name):
            fail(
                f"{name!r} has no password; `cachesvc admin password --list` lists the names "
                "that have one"
            )
        open_books.accounts.trail.record("admin.remove", name, by=actor(), reason=reason)
    _end_sessions(path, name)
    note(f"{name} can no longer log in")


def _ask() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    password: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    return password


def _end_sessions(path: Path, name: str) -> None:
    server = find_server(path)
    if server is not None:
        server.post(f"/admin/api/sessions/end?name={name}")
