"""Carries out `billing.operations` for commands: through the running server, or on its directory.

If a server runs on the data directory, its JSON API does the work. If none runs, or --database-url
names a database, the same function runs here. Commands cannot tell the difference.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast
from urllib.parse import quote, urlencode

from api.admin.routes.operations import PREFIX, operation_of
from billing.errors import BillingError
from billing.operations.books import Books
from cachesvc.cli.exits import exit_code
from cachesvc.cli.money.books import open_books
from cachesvc.cli.options import data_dir_of
from cachesvc.cli.render import fail
from cachesvc.server.server_file import LiveError, LiveServer, find_server

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE_S = 600.0  # rating or refunding a long history takes minutes


class Operations(Protocol):
    """Carries out one operation of `billing.operations` with its keyword arguments."""

    def __call__(
        self, operation: Callable[Concatenate[Books, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...


class LocalOperations:
    """Operations on books that are open here."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def __call__(
        self, operation: Callable[Concatenate[Books, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return operation(self._books, *args, **kwargs)


class ServerOperations:
    """Operations carried out by a running server. A header names the user."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server

    def __call__(
        self, operation: Callable[Concatenate[Books, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        assert not args, args
        _, method, template, _ = operation_of(operation)
        arguments: dict[str, Any] = {k: v for k, v in kwargs.items() if k != "by"}
        path = re.sub(
            r"\{(\w+)\}", lambda name: quote(str(arguments.pop(name[1])), safe=""), template
        )
        if method == "POST":
            answer = self._server.post(PREFIX + path, arguments, timeout_s=PATIENCE_S)
        else:
            query = urlencode({k: v for k, v in arguments.items() if v is not None})
            answer = self._server.get(f"{PREFIX}{path}?{query}", timeout_s=PATIENCE_S)
        return cast(R, answer)


@contextmanager
def operations(
    data_dir: Path | None, database: str | None, *, create: bool = False
) -> Iterator[Operations]:
    """The operations for a command. An error ends the command with its message.

    `create` creates the ledger if there is none.
    """
    path = data_dir_of(data_dir)
    try:
        server = find_server(path) if database is None else None
        if server is not None:
            yield ServerOperations(server)
            return
        with open_books(path, database, create=create) as books:
            yield LocalOperations(books)
    except (BillingError, LiveError) as error:
        fail(str(error), exit_code(error))
