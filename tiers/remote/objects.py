"""The remote store of records: bytes under names, in Redis, a Redis Cluster or S3.

    redis://host:port/db                    rediss:// with TLS
    redis+cluster://host:port,host:port     initial nodes; rediss+cluster:// with TLS
    s3://bucket/prefix                      with `?endpoint=...&region=...`, as obstore names them

Every call has a time limit. Every error of a client is raised as `RemoteError`. Reader threads and
the publisher call it, several at a time.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit, urlunsplit

from tiers.disk.storage import PageBuffer
from tiers.errors import ConfigurationError, TierError
from tiers.remote.breaker import Breaker

DELETE_AT_ONCE = 512
PIECE_BYTES = 512 << 10  # of a value in Redis, answered at once; see `_RedisObjects._read`
PIECES_AHEAD = 2
S3_CONNECTIONS = 16  # an object of a bucket arrives at some 100 MB/s, after some 20 ms
S3_PIECE_BYTES = 1 << 20  # of an object that arrives, copied at once

Take = Callable[[int, memoryview], None]
Ask = Callable[[Any, Sequence[int]], None]
Command = tuple[str | bytes, ...]


class RemoteError(TierError):
    """The store did not answer in time, or refused."""


class ObjectStore(Protocol):
    """Bytes under names. Each method raises RemoteError. `num_failed` counts failures that raised
    nothing: one node of several failed, the others answered."""

    num_failed: int

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def read(self, names: Sequence[str], take: Take) -> None:
        """Calls `take(number, value)` for each of these that is there, while the next arrives. A
        value is page-aligned, and valid during the call."""

    def put(self, name: str, data: bytes) -> None: ...

    def delete(self, names: Sequence[str]) -> int:
        """Returns how many existed. A store that does not tell counts every name."""

    def names(self, start: str) -> Iterator[str]:
        """Every name that begins with `start`."""

    def close(self) -> None: ...


def open_objects(url: str, timeout_s: float) -> ObjectStore:
    """The store behind a URL. Makes no call yet. Raises ConfigurationError."""
    parts = urlsplit(url)
    if parts.scheme == "s3":
        return _S3Objects(url, timeout_s)
    if parts.scheme.removesuffix("+cluster") in ("redis", "rediss"):
        if "@" in parts.path + parts.query + parts.fragment:  # then errors may repeat a password
            raise ConfigurationError("write / ? # @ of a remote tier's password as %2F %3F %23 %40")
        return (_ClusterObjects if "+" in parts.scheme else _RedisObjects)(url, timeout_s)
    shown = parts.scheme or url.rpartition("@")[2]  # without its password
    known = "redis://, redis+cluster:// or s3://"
    raise ConfigurationError(f"no remote tier uses {shown!r}; use {known}")


def shown_url(url: str) -> str:
    """The URL without its password, for logs and pages."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


class _RedisObjects:
    """One server. Each call is a pipeline, but values are read from the socket into memory that is
    used again: a parser copies them twice more, to fresh memory."""

    def __init__(self, url: str, timeout_s: float) -> None:
        redis = _redis()
        of_clusters = redis.exceptions.RedisClusterException
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, of_clusters, OSError)
        self._moved: type[Exception] = redis.exceptions.AskError
        self._open: Callable[[], Any] = lambda: redis.Redis.from_url(url, **_limits(timeout_s))
        try:
            int(urlsplit(url).path.strip("/") or 0)  # where redis-py takes the first for any other
            self._open().connection_pool.make_connection()  # which is not made yet
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{shown_url(url)} cannot be used: {error}") from None
        self._held: Any = None
        self._memory = _Memory()
        self.num_failed = 0

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [bool(found) for found in self._run([("STRLEN", name) for name in names])]

    def read(self, names: Sequence[str], take: Take) -> None:
        with _refusing(self._errors):
            if names:
                self._read(self._client(), names, take)

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

    def _run(self, commands: Sequence[Command], *, whole: bool = False) -> list[Any]:
        """The answer to each command. Unless `whole`, some may be None for want of an answer."""
        with _refusing(self._errors):
            return self._pipe(self._client(), commands)

    def _pipe(self, client: Any, commands: Sequence[Command]) -> list[Any]:
        pipe = client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        answers: list[Any] = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                raise answer
        return answers

    def _read(self, client: Any, names: Sequence[str], take: Take) -> None:
        """Piece by piece, of which the next are requested while one arrives: a server answers each
        in memory that it has, and would need fresh memory for two whole values at once."""
        sizes = self._pipe(client, [("STRLEN", name) for name in names])
        for number in [at for at, size in enumerate(sizes) if isinstance(size, Exception)]:
            sizes[number] = 0
            take(number, memoryview(b""))  # a list, say, is as damaged as a value can be
        pieces = [
            (number, begin, min(begin + PIECE_BYTES, size))
            for number, size in enumerate(sizes)
            for begin in range(0, size, PIECE_BYTES)
        ]
        pool, link = client.connection_pool, client.connection_pool.get_connection()
        ahead, num_bytes = iter(pieces), 0

        def request(count: int) -> None:
            for number, begin, end in islice(ahead, count):
                link.send_command("GETRANGE", names[number], begin, end - 1)

        try:
            with link._sock.makefile("rb") as replies:
                request(PIECES_AHEAD)
                for number, begin, end in pieces:
                    room = self._memory.take(sizes[number] + 2)
                    num_bytes += self._piece(replies, room[begin : end + 2])
                    request(1)
                    if end == sizes[number]:
                        if num_bytes == end:  # else it was removed meanwhile
                            take(number, room[:end])
                        num_bytes = 0
        except BaseException:
            link.disconnect()  # what may still arrive would answer another's command
            raise
        finally:
            pool.release(link)

    def _piece(self, replies: Any, room: memoryview) -> int:
        """Reads an answer and its end into `room`. Returns the bytes of the answer."""
        head: bytes = replies.readline()
        if not (head.startswith(b"$") and head[1:].rstrip().isdigit()):
            raise ConnectionError(f"the answer to GETRANGE is {head[:80]!r}")
        room = room[: int(head[1:]) + 2]
        if replies.readinto(room) != int(head[1:]) + 2:
            raise ConnectionError("the connection ended within a value")
        return len(room) - 2


class _Memory(threading.local, PageBuffer):
    """A thread's memory for one value."""


class _ClusterObjects(_RedisObjects):
    """A cluster. Each call is a pipeline to every node it concerns. Nodes fail independently.

    Records of a failed node are missing from a lookup. Writing or removing them is an error.
    `redis+cluster://` may name several initial nodes, separated by commas.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url.replace("+cluster", "", 1))
        hosts = parts.netloc.split(",")
        plain = urlunsplit(parts._replace(netloc=hosts[0]))
        super().__init__(plain, timeout_s)
        redis, nodes = _redis(), [urlsplit(f"//{host}") for host in hosts]
        self._open = lambda: redis.RedisCluster(
            startup_nodes=[redis.cluster.ClusterNode(at.hostname, at.port or 6379) for at in nodes],
            url=plain,
            require_full_coverage=False,
            **_limits(timeout_s),
        )
        self._breakers: dict[str, Breaker] = {}

    def read(self, names: Sequence[str], take: Take) -> None:
        def ask(client: Any, numbers: Sequence[int]) -> None:
            mine = [names[number] for number in numbers]
            self._read(client, mine, lambda at, value: take(numbers[at], value))

        self._ask(names, ask, whole=False)

    def _run(self, commands: Sequence[Command], *, whole: bool = False) -> list[Any]:
        """The answer to each command. Unless `whole`, the answer is None if its node failed."""
        answers: list[Any] = [None] * len(commands)

        def ask(client: Any, numbers: Sequence[int]) -> None:
            found = self._pipe(client, [commands[number] for number in numbers])
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer

        self._ask([command[1] for command in commands], ask, whole=whole)
        return answers

    def _ask(self, names: Sequence[str | bytes], ask: Ask, *, whole: bool) -> None:
        """Calls `ask` with the client of each node and the numbers of its names. Raises the error
        of a node if none answered, or with `whole`."""
        with _refusing(self._errors):
            client = self._client()
            groups: dict[str, tuple[Any, list[int]]] = {}
            for number, name in enumerate(names):
                node = client.get_node_from_key(name)
                if node is None:
                    raise ConnectionError("no node has the slot of a name")
                groups.setdefault(node.name, (node, []))[1].append(number)
        error: RemoteError | None = None
        num_done = 0
        for name, (node, numbers) in groups.items():
            breaker = self._breakers.setdefault(name, Breaker())
            if not breaker.allows():
                error = error or RemoteError(f"the node {name} has failed and is left alone")
                continue
            try:
                with _refusing(self._errors):
                    try:
                        ask(client.get_redis_connection(node), numbers)
                    except self._moved:
                        client.nodes_manager.initialize()  # where slots are now, for next time
                        raise
            except RemoteError as failed:
                breaker.failed()
                error = failed
                self.num_failed += 1
                continue
            breaker.succeeded()
            num_done += 1
        if error is not None and (whole or not num_done):
            raise error


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
        "protocol": 2,  # a server of the third may send what nobody asked for among the answers
    }


@contextmanager
def _refusing(errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn the client's errors into RemoteError."""
    try:
        yield
    except errors as error:
        told = str(error).partition("\n")[0]  # obstore's goes on with its source
        raise RemoteError(f"{type(error).__name__}: {told}") from error


class _S3Objects:
    """A bucket, through obstore. S3 has no request for several objects, so many run at once."""

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
        limits: Any = {"timeout": limit, "connect_timeout": limit, "allow_http": plain_http}
        once: Any = {"max_retries": 0}
        prefix = parts.path.strip("/") or None
        try:
            self._store: Any = S3Store(
                parts.netloc, prefix=prefix, config=config, client_options=limits, retry_config=once
            )
        except BaseError as error:
            told = str(error).partition("\n")[0]
            raise ConfigurationError(f"{shown_url(url)} cannot be used: {told}") from None
        self._obstore: Any = obstore
        self._errors: tuple[type[Exception], ...] = (BaseError, OSError)
        self._threads = ThreadPoolExecutor(S3_CONNECTIONS, thread_name_prefix="cachesvc-s3")
        self._spare: list[PageBuffer] = []

    def exists(self, names: Sequence[str]) -> list[bool]:
        heads = self._threads.map(lambda name: self._one(self._obstore.head, name), names)
        return [head is not None for head in heads]

    def read(self, names: Sequence[str], take: Take) -> None:
        for number, found in enumerate(self._threads.map(self._fetch, names)):
            if found is not None:
                memory, nbytes = found
                take(number, memory.take(nbytes)[:nbytes])
                self._spare.append(memory)

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
        self._threads.shutdown()
        self._store = None

    def _fetch(self, name: str) -> tuple[PageBuffer, int] | None:
        """An object in memory that was used before: obstore's own copy would be in fresh memory."""
        answer = self._one(self._obstore.get, name)
        if answer is None:
            return None
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = PageBuffer()
        room, nbytes = memory.take(answer.meta["size"]), 0
        with _refusing(self._errors):
            for piece in answer.stream(S3_PIECE_BYTES):
                room[nbytes : nbytes + len(piece)] = piece
                nbytes += len(piece)
        return memory, nbytes

    def _one(self, call: Callable[[Any, str], Any], name: str) -> Any:
        with _refusing(self._errors), suppress(FileNotFoundError):
            return call(self._store, name)
        return None
