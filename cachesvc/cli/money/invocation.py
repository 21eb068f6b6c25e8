"""Carries out `billing.operations` for commands: through the running server, or on its directory.

If a server runs on the data directory, its JSON API does the work. If none runs, or --database-url
names a database, the same function runs here. Commands cannot tell the difference.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from urllib.parse import quote

from api.admin.routes.operation_table import PREFIX, operation_of
from billing.operations.books import Books
from cachesvc.cli.money.books import NO_REASON, DatabaseUrl, Reason, Why, Yes, books
from cachesvc.cli.options import DataDir, data_dir_of
from cachesvc.cli.render import AsJson, must_ask
from cachesvc.server.server_file import LiveServer, actor, find_server

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE_S = 600.0  # rating or refunding a long history takes minutes


class Invocation:
    """Carries out one command's operations, and says who calls, why, and how to answer.

    Finds the server, or opens the directory, at the first call.
    """

    def __init__(self, stack: ExitStack, shared: Mapping[str, Any], *, create: bool) -> None:
        self._stack, self._create = stack, create
        self._place: LiveServer | Books | None = None
        self.data_dir: Path | None = shared["data_dir"]
        self.database: str | None = shared["database"]
        self.json: bool = shared.get("json", False)
        self.why: str = shared.get("reason", NO_REASON)
        self.asks = must_ask(shared.get("yes", False))  # whether to ask before it acts

    def __call__(
        self, operation: Callable[Concatenate[Books, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Carries out an operation of `billing.operations` with its keyword arguments."""
        assert not args, args
        place = self._place = self._place or self._found()
        if isinstance(place, LiveServer):
            return cast(R, _asked(place, operation, kwargs))
        return operation(place, *args, **kwargs)

    def change(self, operation: Callable[..., R], **given: Any) -> R:
        """The same for one that changes something: says who calls, and why."""
        return self(operation, **given, by=actor(), why=self.why)

    def _found(self) -> "LiveServer | Books":
        server = find_server(data_dir_of(self.data_dir)) if self.database is None else None
        if server is not None:
            return server
        opened = books(self.data_dir, self.database, create=self._create)
        return self._stack.enter_context(opened)


def _asked(server: LiveServer, operation: Callable[..., object], given: Mapping[str, Any]) -> Any:
    """The server's answer to an operation. A header names the user."""
    row = operation_of(operation)
    arguments = {name: value for name, value in given.items() if name != "by"}
    path = re.sub(r"\{(\w+)\}", lambda name: quote(str(arguments.pop(name[1])), safe=""), row.path)
    if row.method == "POST":
        return server.post(PREFIX + path, arguments, timeout_s=PATIENCE_S)
    return server.get(PREFIX + path, arguments, timeout_s=PATIENCE_S)


def _option(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


# Options that commands share, in the order of `--help`.
_SHARED: Mapping[str, Parameter] = {
    "why": _option("reason", Why),
    "reason": _option("reason", Reason, NO_REASON),
    "yes": _option("yes", Yes, False),
    "data_dir": _option("data_dir", DataDir, None),
    "database": _option("database", DatabaseUrl, None),
    "json": _option("json", AsJson, False),
}


def operating(
    *options: str, create: bool = False
) -> Callable[[Callable[Concatenate[Invocation, ...], None]], Callable[..., None]]:
    """Gives the function an `Invocation`, and the command its options.

    `options` are "reason" or "why" (must be given), "yes" and "json"; a place to work on is always
    one. `create` creates the ledger if there is none.
    """

    def decorate(function: Callable[Concatenate[Invocation, ...], None]) -> Callable[..., None]:
        names = {*options, "data_dir", "database"}
        shared = [option for name, option in _SHARED.items() if name in names]
        _, *own = inspect.signature(function).parameters.values()

        @wraps(function)
        def run(**given: Any) -> None:
            options = {each.name: given.pop(each.name) for each in shared}
            with ExitStack() as stack:
                function(Invocation(stack, options, create=create), **given)

        parameters = [*(each.replace(kind=Parameter.KEYWORD_ONLY) for each in own), *shared]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate
