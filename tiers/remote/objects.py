"""The remote store of records: bytes under names, in Redis, a Redis Cluster or S3.

    redis://host:port/db                    rediss:// with TLS
    redis+cluster://host:port,host:port     initial nodes; rediss+cluster:// with TLS
    s3://bucket/prefix                      with `?endpoint=...&region=...`, as obstore names them

Every call has a time limit. Every error of a client is raised as `RemoteError`. Reader threads and
the publisher call it, several at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

from tiers.errors import ConfigurationError, TierError
from tiers.remote.breaker import StoreBreaker

DELETE_AT_ONCE = 512


class RemoteError(TierError):
    """The store did not answer in time, or refused."""


class ObjectStore(Protocol):
    """Bytes under names. Each method raises RemoteError. `num_failed` counts failures that raised
    nothing: one node of several failed, the others answered."""

    num_failed: int

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def get(self, names: Sequence[str]) -> list[bytes | None]: ...

    def put(self, name: str, data: bytes) -> None: ...

    def delete(self, names: Sequence[str]) -> int:
        """Returns how many existed. A store that does not tell counts every name."""

    def names(self, start: str) -> Iterator[str]:
        """Every name that begins with `start`."""

    def close(self) -> None: ...


def open_objects(url: str, timeout_s: float) -> ObjectStore:
    """The store behind a URL. Makes no call yet. Raises ConfigurationError."""
    scheme = urlsplit(url).scheme
    if scheme in ("redis", "rediss"):
        return _RedisObjects(url, timeout_s)
    if scheme in ("redis+cluster", "rediss+cluster"):
        return _ClusterObjects(url, timeout_s)
    if scheme == "s3":
        return _S3Objects(url, timeout_s)
    shown = scheme or url.rpartition("@")[2]  # without its password
    raise ConfigurationError(
        f"no remote tier uses {shown!r}; use redis://, redis+cluster:// or s3://"
    )


def shown_url(url: str) -> str:
    """The URL without its password, for logs and pages."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


class _RedisObjects:
    """One server. Each call is a pipeline, but records arrive one by one: a pipeline of them waits
    for fresh memory for all. hiredis parses, where it is installed."""

    def __init__(self, url: str, timeout_s: float) -> None:
        redis = _redis()
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        self._open: Callable[[], Any] = lambda: redis.Redis.from_url(url, **_limits(timeout_s))
        self._held: Any = None
        self.num_failed = 0

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [bool(found) for found in self._run([("EXISTS", name) for name in names])]

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return [self._run([("GET", name)])[0] for name in names]

    def put(self, name: str, data: bytes) -> None:
        self._run([("SET", name, data)], whole=True)

    def delete(self, names: Sequence[str]) -> int:
        return sum(self._run([("DEL", name) for name in names], whole=True))

    def names(self, start: str) -> Iterator[str]:
        with _refusing(self._errors):
            for name in self._client().scan_iter(match=f"{start}*", count=DELETE_AT_ONCE):
                yield name.decode()

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def _client(self) -> Any:
        if self._held is None:
            self._held = self._open()
        return self._held

    def _run(
        self, commands: Sequence[tuple[str | bytes, ...]], *, whole: bool = False
    ) -> list[Any]:
        """The answer to each command. Unless `whole`, some may be None for want of an answer."""
        with _refusing(self._errors):
            pipe = self._client().pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = pipe.execute()
            return answers


class _ClusterObjects(_RedisObjects):
    """A cluster. Each call is a pipeline to every node it concerns. Nodes fail independently.

    Records of a failed node are missing from a lookup. Writing or removing them is an error.
    `redis+cluster://` may name several initial nodes, separated by commas.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(url, timeout_s)
        redis = _redis()
        cluster_node: Any = redis.cluster.ClusterNode
        parts = urlsplit(url)
        user, _, hosts = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        nodes = [urlsplit(f"//{host}") for host in hosts.split(",")]
        self._moved: tuple[type[Exception], ...] = (redis.exceptions.AskError,)
        self._open = lambda: redis.RedisCluster(
            startup_nodes=[cluster_node(node.hostname, node.port or 6379) for node in nodes],
            username=unquote(name) or None,
            password=unquote(password) or None,
            ssl=parts.scheme.startswith("rediss"),
            require_full_coverage=False,
            **_limits(timeout_s),
        )
        self._breakers: dict[str, StoreBreaker] = {}

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return self._run([("GET", name) for name in names])

    def _run(
        self, commands: Sequence[tuple[str | bytes, ...]], *, whole: bool = False
    ) -> list[Any]:
        """The answer to each command. Unless `whole`, the answer is None if its node failed."""
        with _refusing(self._errors):
            client = self._client()
            groups: dict[str, tuple[Any, list[int]]] = {}
            for number, command in enumerate(commands):
                node = client.get_node_from_key(command[1])
                if node is None:
                    raise ConnectionError("no node has the slot of a name")
                groups.setdefault(node.name, (node, []))[1].append(number)
        answers: list[Any] = [None] * len(commands)
        error: RemoteError | None = None
        num_done = 0
        for name, (node, numbers) in groups.items():
            breaker = self._breakers.setdefault(name, StoreBreaker())
            if not breaker.allows():
                error = error or RemoteError(f"the node {name} has failed and is left alone")
                continue
            try:
                found = self._ask(client, node, [commands[number] for number in numbers])
            except RemoteError as failed:
                breaker.failed()
                error = failed
                self.num_failed += 1
                continue
            breaker.succeeded()
            num_done += 1
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
        if error is not None and (whole or not num_done):
            raise error
        return answers

    def _ask(
        self, client: Any, node: Any, commands: Sequence[tuple[str | bytes, ...]]
    ) -> list[Any]:
        with _refusing(self._errors):
            pipe = client.get_redis_connection(node).pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            answers = pipe.execute(raise_on_error=False)
            failed = next((answer for answer in answers if isinstance(answer, Exception)), None)
            if failed is not None:
                if isinstance(failed, self._moved):
                    client.nodes_manager.initialize()  # slots moved: find where, for next time
                raise failed
            return list(answers)


def _redis() -> Any:
    try:
        import redis
        import redis.cluster
    except ImportError as error:
        raise ConfigurationError(
            "a remote tier in Redis needs redis-py: pip install 'cachesvc[redis]'"
        ) from error
    return redis


def _limits(timeout_s: float) -> dict[str, Any]:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 1),
    }


@contextmanager
def _refusing(errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn the client's errors into RemoteError."""
    try:
        yield
    except errors as error:
        raise RemoteError(f"{type(error).__name__}: {error}") from error


class _S3Objects:
    """A bucket, through obstore. Objects are requested one by one, as S3 offers no other way."""

    num_failed = 0

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ImportError as error:
            raise ConfigurationError(
                "a remote tier in S3 needs obstore: pip install 'cachesvc[s3]'"
            ) from error
        parts = urlsplit(url)
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        limit = f"{max(1, round(timeout_s * 1000))}ms"
        plain_http = options.get("endpoint", "").startswith("http://")
        config: Any = {f"aws_{name}": value for name, value in options.items()}
        self._store: Any = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            config=config,
            client_options={"timeout": limit, "connect_timeout": limit, "allow_http": plain_http},
            retry_config={"max_retries": 0},
        )
        self._obstore: Any = obstore
        self._errors: tuple[type[Exception], ...] = (BaseError, OSError)

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [self._one(self._obstore.head, name) is not None for name in names]

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return [self._one(self._read, name) for name in names]

    def put(self, name: str, data: bytes) -> None:
        with _refusing(self._errors):
            self._obstore.put(self._store, name, data)

    def delete(self, names: Sequence[str]) -> int:
        with _refusing(self._errors), suppress(FileNotFoundError):
            self._obstore.delete(self._store, list(names))
        return len(names)

    def names(self, start: str) -> Iterator[str]:
        with _refusing(self._errors):
            for page in self._obstore.list(self._store, prefix=start.rstrip("/")):
                yield from (entry["path"] for entry in page)

    def close(self) -> None:
        self._store = None

    def _read(self, store: Any, name: str) -> bytes:
        return bytes(self._obstore.get(store, name).bytes())

    def _one(self, call: Callable[[Any, str], Any], name: str) -> Any:
        with _refusing(self._errors), suppress(FileNotFoundError):
            return call(self._store, name)
        return None
