"""The server that is asked, over HTTP. Any number of threads."""

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cachesvc.conform.question import Question, ServedAnswer, read_answer

ANSWER_S = 600.0
BUSY = (429, 503)  # asked again after the time that the server names
BUSY_S, MAX_BUSY_S, MAX_BUSY = 1.0, 30.0, 20
UNIQUE = "{unique}"  # in a dialect, stands for a text that no other request has

# What makes a request read nothing from a cache, by the `owned_by` of the server's models.
COLD: Mapping[str, Mapping[str, Any]] = {
    "cachesvc": {"cachesvc": {"cache": False}},
    "vllm": {"cache_salt": UNIQUE},
    "sglang": {"extra_key": UNIQUE},
    "llamacpp": {"cache_prompt": False},
}


class TargetError(Exception):
    """The server cannot be reached or refuses. The message says what it answered."""


class Exchanges:
    """The exchanges that are under way, and how to end them all at once."""

    def __init__(self) -> None:
        self._waiting: set[socket.socket] = set()
        self._hung_up = threading.Event()

    def hang_up(self) -> None:
        """Whoever waits for an answer, and whoever asks from now on, gets a TargetError."""
        self._hung_up.set()
        for waiting in list(self._waiting):
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                waiting.shutdown(socket.SHUT_RDWR)

    def rest(self, seconds: float) -> None:
        self._hung_up.wait(seconds)

    @contextlib.contextmanager
    def opened(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """Connects for one exchange."""
        connection.connect()
        used = connection.sock  # the connection lets go of it before the answer is read
        self._waiting.add(used)
        try:
            if self._hung_up.is_set():
                raise ConnectionAbortedError("the run has ended")
            yield
        finally:
            self._waiting.discard(used)
            connection.close()


@dataclass
class Target:
    """A server. `cold` is what a body needs to read nothing from the cache; None if unknown.
    `others` are further models on the same weights, such as adapters. `serves` is what our own
    server tells of its engine and contents."""

    url: str
    model: str
    owner: str
    key: str | None = None
    cold: Mapping[str, Any] | None = None
    others: tuple[str, ...] = ()
    serves: Mapping[str, str] | None = None
    line: Exchanges = field(default_factory=Exchanges)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def is_ours(self) -> bool:
        return self.owner == "cachesvc"

    def ask(
        self, question: Question, *, cold: bool = False, model: str | None = None
    ) -> ServedAnswer:
        """The server's answer. Raises TargetError."""
        body = question.body(model or self.model)
        if self.owner in COLD:
            body["ignore_eos"] = True
        if cold and self.cold is not None:
            unique = f"conform-{time.time_ns()}-{next(self._numbers)}"
            body |= json.loads(json.dumps(self.cold).replace(UNIQUE, unique))
        try:
            answered = _json(self.url, "/v1/completions", self.key, body, self.line)
            return read_answer(answered)
        except (ValueError, KeyError, TypeError) as error:
            raise TargetError(f"{self.url} answered what is no completion: {error}") from error


def find_target(
    url: str, *, model: str | None, key: str | None, cold: Mapping[str, Any] | None
) -> Target:
    """The server at `url` and the model to ask, its first if none is named. Raises TargetError."""
    url = url.rstrip("/").removesuffix("/v1")
    models = _json(url, "/v1/models", key).get("data") or []
    named = [each for each in models if model in (None, each.get("id"))]
    if not named:
        served = ", ".join(str(each.get("id")) for each in models) or "none"
        raise TargetError(f"{url} does not serve {model}; it serves {served}")
    owner = str(named[0].get("owned_by", ""))
    name, root = str(named[0]["id"]), named[0].get("root")
    others = [str(each["id"]) for each in models if root is not None and each.get("root") == root]
    return Target(
        url,
        name,
        owner,
        key,
        cold or COLD.get(owner),
        others=tuple(each for each in others if each != name),
        serves=(named[0].get("exactness") or {}).get("serves"),
    )


def _json(
    url: str, path: str, key: str | None, body: Any = None, line: Exchanges | None = None
) -> Any:
    line = line or Exchanges()
    for tried in range(MAX_BUSY + 1):
        status, text, wait_s = _exchange(url, path, key, body, line)
        if status not in BUSY or tried == MAX_BUSY:
            break
        line.rest(min(wait_s, MAX_BUSY_S))
    if status != 200:
        said = text[:300].decode("utf-8", "replace")
        raise TargetError(f"{url}{path} answered {status}: {said}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise TargetError(f"{url}{path} answered no JSON: {text[:80]!r}") from error


def _exchange(
    url: str, path: str, key: str | None, body: Any, line: Exchanges
) -> tuple[int, bytes, float]:
    """Status and body of the answer, and the seconds after which a busy server wants to be asked
    again."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.scheme not in ("http", "https"):
        raise TargetError(f"{url} is not the URL of a server; write http://HOST:PORT")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=ANSWER_S)
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    try:
        method = "GET" if body is None else "POST"
        data = None if body is None else json.dumps(body)
        with line.opened(connection):
            connection.request(method, parts.path + path, data, headers)
            answer = connection.getresponse()
            wait = answer.headers.get("retry-after") or ""
            return answer.status, answer.read(), float(wait) if wait.isdigit() else BUSY_S
    except (OSError, http.client.HTTPException) as error:
        raise TargetError(f"{url} does not answer: {type(error).__name__} {error}") from error
