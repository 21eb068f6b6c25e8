"""How commands find and call the server that runs on a data directory.

While it runs, the server has a `server.json` in its data directory, readable by its owner only. It
holds the address, the process id and the operator's token. Commands call `find_server`.
"""

import contextlib
import getpass
import http.client
import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

logger = logging.getLogger(__name__)

FILE_NAME = "server.json"
TIMEOUT_S = 30.0
FIND_TIMEOUT_S = 30.0  # a busy server's answer to the first question
Query = Mapping[str, Any] | Sequence[tuple[str, Any]]
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  an address to connect to instead


class LiveError(Exception):
    """The running server refused or did not answer. The message is the server's or gives the
    reason."""


class ServerSilent(LiveError):
    """The server did not answer in time, although something listens at its address."""


class ServerFoundWrong(LiveError):
    """The server refused a value that it was given."""


@dataclass(frozen=True, slots=True)
class LiveServer:
    url: str
    pid: int
    token: str = field(repr=False)

    def get(self, path: str, query: Query = (), *, timeout_s: float = TIMEOUT_S) -> Any:
        """The JSON at `path`, or the text if it is not JSON. Raises LiveError."""
        return self._ask("GET", path + _asked(query), None, timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> Any:
        """The JSON answer of `path` to `body`. Raises LiveError."""
        return self._ask("POST", path, body, timeout_s)

    def _ask(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        headers = {"Authorization": f"Bearer {self.token}", "X-Cachesvc-Actor": actor()}
        payload, at = None, urlsplit(self.url)
        if body is not None:
            payload = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=timeout_s)
        with contextlib.closing(connection):
            try:
                connection.request(method, path, payload, headers)
                response = connection.getresponse()
                text = response.read()
            except TimeoutError:
                silence = f"the server at {self.url} has not answered for {timeout_s:g} s"
                raise ServerSilent(silence) from None
            except (OSError, http.client.HTTPException) as error:
                raise LiveError(f"the server at {self.url} does not answer: {error}") from None
        return _taken(response.status, text)


def find_server(data_dir: Path) -> LiveServer | None:
    """The server that runs on `data_dir` and accepts our token, or None.

    Raises ServerSilent if it is too busy to answer, because its data must not be changed behind it.
    """
    try:
        fields = json.loads((data_dir / FILE_NAME).read_text())
        server = LiveServer(fields["url"], fields["pid"], fields["token"])
        os.kill(server.pid, 0)
        server.get("/admin/api/whoami", timeout_s=FIND_TIMEOUT_S)
    except ServerSilent as error:
        raise ServerSilent(f"{error}; try again, or end process {server.pid} first") from None
    except (OSError, ValueError, KeyError, LiveError):
        return None
    return server


@contextlib.contextmanager
def announced(data_dir: Path, url: str, token: str) -> Iterator[None]:
    path = data_dir / FILE_NAME
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    fields = {"url": reachable(url), "pid": os.getpid(), "token": token}
    fresh.write_text(json.dumps(fields) + "\n")
    fresh.replace(path)
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # a file of a process that is gone is not taken for a server
            logger.warning(f"{path} could not be removed: {error.strerror}")


def new_token() -> str:
    return "op-" + secrets.token_urlsafe(32)


def reachable(url: str) -> str:
    """`url` with a connectable address, if the server listens on all addresses."""
    address = urlsplit(url)
    host = _ANY_ADDRESS.get(address.hostname or "", address.hostname or "")
    return f"http://{f'[{host}]' if ':' in host else host}:{address.port}"


def _asked(query: Query) -> str:
    """The query of a URL; what is None is not asked."""
    pairs = query.items() if isinstance(query, Mapping) else query
    given = [(name, value) for name, value in pairs if value is not None]
    return f"?{urlencode(given)}" if given else ""


def _taken(status: int, text: bytes) -> Any:
    try:
        body = json.loads(text) if text else None
    except ValueError:
        if status < 300:
            return text.decode()
        raise LiveError(f"the server answered {status} without JSON") from None
    if status < 300:
        return body
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        raise LiveError(f"the server said {status}")
    raise (ServerFoundWrong if error.get("code") == "invalid_value" else LiveError)(
        error["message"]
    )


def actor() -> str:
    """The user at this terminal, for the audit log."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):
        return "cli"
