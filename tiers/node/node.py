"""A node: one thread that serves pools of blocks to clients over a Unix socket.

    client ──request──► Node ──► Pool ──► Mover (disk)         one request at a time a client
           ◄──answer───      ◄── work ◄── wake-up

A probe or a lease that waits for the disk is answered when the disk is done. Other clients are
served meanwhile. When a client's connection ends, for any reason, its leases end and the blocks
that it was writing are dropped. Nothing a client sends can stop the node: it refuses a message that
it cannot accept, and closes the connection.
"""

import contextlib
import fcntl
import logging
import os
import selectors
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiers.blocks.keys import KEY_BYTES, PrefixKey
from tiers.disk.directory import DirectoryLock, make_root, read_holder
from tiers.errors import ConfigurationError, DirectoryLocked, NodeError
from tiers.node import messages
from tiers.node.messages import HEADER, MAX_BODY, VERSION, Op
from tiers.node.operations import Operated
from tiers.node.pool import Lease, NodeProbe, Pool
from tiers.node.pools import NodePools
from tiers.node.settings import NodeSettings
from tiers.telemetry.events import EventStream

logger = logging.getLogger(__name__)

MAX_CLIENTS = 256
MAX_UNSENT = 1 << 20  # bytes of unread answers; a client that asks for more is disconnected
MAX_SHARE = 1 / 2  # of the memory, that one connection may lease and reserve at once
TICK_S = 1.0  # how often pins are checked
MAX_NAME = 200  # characters of an owner's name
_READ_BYTES = 1 << 18


@dataclass(slots=True, eq=False)
class _Client:
    """One connection: the bytes it has sent so far, and the frames it holds."""

    number: int
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    leased: Counter[tuple[int, int]] = field(default_factory=Counter)  # (pool, frame)
    filling: set[tuple[int, int]] = field(default_factory=set)
    locked: set[tuple[int, int]] = field(default_factory=set)  # (pool, piece)
    waits: "tuple[int, Lease | NodeProbe | Operated] | None" = None
    asked: Op = Op.STATS  # the operation it waits for


class NodeServer:
    """Serves clients until `stop`. `open` may raise ConfigurationError and DirectoryLocked."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.stream = EventStream()
        self._pools = NodePools(settings, self.stream, self._wake_up)
        self._clients: dict[int, _Client] = {}
        self._num_clients = 0
        self._stopping = False

    def open(self) -> None:
        """Take the socket's path and lock the disk folder. Clients can connect when it returns."""
        self.settings.check()
        with contextlib.ExitStack() as held:
            self._listener = _listener_at(self.settings.socket, held)
            if self.settings.disk_dir is not None:
                held.callback(_locked(self.settings.disk_dir).release)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            held.callback(os.close, self._wake)
            self._held = held.pop_all()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def stop(self) -> None:
        """End `run` after the current step. Any thread may call it, and signal handlers."""
        self._stopping = True
        self._wake_up()

    def run(self) -> None:
        while not self._stopping:
            idle = not self._clients and not len(self._pools)
            for key, events in self._selector.select(None if idle else TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                else:
                    self._attend(key.data, events)
            self._pools.work()
            for client in [each for each in self._clients.values() if each.waits]:
                self._answer_if_ready(client)

    def close(self) -> None:
        """End every connection, write blocks that only memory holds, and free everything."""
        for client in list(self._clients.values()):
            self._end(client, has_left=False)
        self.settings.socket.unlink(missing_ok=True)
        self._pools.close()
        self._selector.close()
        self._held.close()

    # Connections.

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # closed in the meantime
            os.eventfd_write(self._wake, 1)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._clients) >= MAX_CLIENTS:
            logger.warning(f"a client was refused: {MAX_CLIENTS} are connected")
            connection.close()
            return
        connection.setblocking(False)
        self._num_clients += 1
        client = _Client(self._num_clients, connection)
        self._clients[client.number] = client
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _attend(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                self._read(client)
        except NodeError as error:
            logger.warning(f"client {client.number} was disconnected: {error}")
            self._refuse(client, str(error))
        except OSError as error:
            logger.debug(f"client {client.number} has gone: {error}")
            self._end(client)
        except Exception:  # the top of the thread, which serves the others
            logger.exception(f"client {client.number} was disconnected by a fault of the node")
            self._refuse(client, "a fault of the node, see its log")

    def _read(self, client: _Client) -> None:
        data = client.socket.recv(_READ_BYTES)
        if not data:
            self._end(client)
            return
        client.received += data
        if len(client.received) > HEADER.size + MAX_BODY or len(client.unsent) > MAX_UNSENT:
            raise NodeError("a client goes on asking and leaves its answers unread")
        while client.number in self._clients and client.waits is None:
            if len(client.received) < HEADER.size:
                return
            size, op = HEADER.unpack_from(client.received)
            if size > MAX_BODY:
                raise NodeError(f"a message of {size} bytes; at most {MAX_BODY} are accepted")
            if len(client.received) < HEADER.size + size:
                return
            body = bytes(client.received[HEADER.size : HEADER.size + size])
            del client.received[: HEADER.size + size]
            self._handle(client, op, memoryview(body))

    def _send(self, client: _Client, op: Op, body: bytes) -> None:
        client.unsent += messages.pack(op, body)
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        with contextlib.suppress(BlockingIOError):
            del client.unsent[: client.socket.send(client.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.socket, events, client)

    def _refuse(self, client: _Client, reason: str) -> None:
        with contextlib.suppress(OSError):
            client.socket.send(messages.pack(Op.REFUSED, reason.encode()))
        self._end(client, has_left=False)

    def _end(self, client: _Client, *, has_left: bool = True) -> None:
        """End the connection and release everything that it held. Pages that it locked are kept for
        good unless it has left: its GPU may still use them."""
        if self._clients.pop(client.number, None) is None:
            return
        self._selector.unregister(client.socket)
        client.socket.close()
        if client.waits is not None and isinstance(lease := client.waits[1], Lease):
            self._pools.pool(client.waits[0]).give_up(lease)
        for (pool, frame), count in client.leased.items():
            self._pools.pool(pool).release([frame] * count)
        for pool, frame in client.filling:
            self._pools.pool(pool).abandon([frame])
        for pool, piece in client.locked if has_left else ():
            self._pools.pool(pool).arena.unlock(piece)
        self._pools.leave(client.number)

    # Requests.

    def _handle(self, client: _Client, op: int, body: memoryview) -> None:
        if op == Op.HELLO:
            self._hello(client, messages.unpack_json(body))
        elif op in (Op.PROBE, Op.FETCH, Op.LEASE, Op.RESERVE, Op.PUBLISH):
            self._handle_run(client, Op(op), body)
        elif op in (Op.COMMIT, Op.RELEASE):
            self._handle_frames(client, Op(op), body)
        elif op == Op.LOCK:
            self._lock(client, messages.unpack_numbers(body))
        elif op == Op.OPERATE:
            self._operate(client, messages.unpack_json(body))
        elif op == Op.STATS:
            self._send(client, Op.STATS, messages.pack_json(self.stats()))
        else:
            raise NodeError(f"operation {op} is not known to this version of the node")

    def _hello(self, client: _Client, hello: dict[str, Any]) -> None:
        if hello.get("version") != VERSION:
            raise NodeError(f"the node speaks version {VERSION}, not {hello.get('version')!r}")
        number = self._pools.number_of(messages.described_layout(hello.get("layout")))
        memory = self._pools.pool(number).memory
        sizes = {"num_frames": memory.num_frames, "piece_frames": memory.piece_frames}
        answer = messages.pack(Op.HELLO, messages.pack_json({"pool": number, **sizes}))
        if client.unsent or socket.send_fds(client.socket, [answer], [memory.file]) < len(answer):
            raise NodeError("a client said HELLO while it left answers unread")

    def _operate(self, client: _Client, asked: dict[str, Any]) -> None:
        client.asked = Op.OPERATE
        if asked.get("do") == "owners":
            self._pools.know(_owners(asked.get("owners")))
            self._send(client, Op.OPERATE, messages.pack_json({}))
            return
        number = asked.get("pool")
        if type(number) is not int or not 0 <= number < len(self._pools):
            raise NodeError(f"there is no pool {number!r}; say HELLO first")
        client.waits = (number, self._pools.operations(number).operate(client.number, asked))
        self._answer_if_ready(client)

    def _handle_run(self, client: _Client, op: Op, body: memoryview) -> None:
        number, run = messages.unpack_run(body)
        pool = self._pools.pool(number)
        if run.block_size != pool.memory.layout.block_size:
            raise NodeError(f"blocks of {run.block_size} tokens were asked for; see HELLO")
        ids = run.ids()
        client.asked = op
        if op is Op.PUBLISH:
            keys = [block.key for block in ids]
            client.waits = (number, self._pools.operations(number).send(keys))
            self._answer_if_ready(client)
            return
        ids = ids[: self._room_of(client, pool, asks_only=op in (Op.PROBE, Op.FETCH))]
        if op is Op.FETCH:
            pool.fetch(ids)
            return
        if op is Op.RESERVE:
            pairs = pool.reserve(ids)
            client.filling |= {(number, frame) for _, frame in pairs}
            self._send(client, op, messages.pack_pairs(pairs))
            return
        asked = pool.probe(ids) if op is Op.PROBE else pool.lease(ids)
        client.waits = (number, asked)
        self._answer_if_ready(client)

    def _room_of(self, client: _Client, pool: Pool, *, asks_only: bool) -> int:
        """How many more frames of a pool the client may hold. Bounded, because no other engine can
        evict what one engine uses. A probe finds no more blocks than may be leased."""
        most_bytes = int(self._pools.capacity.capacity_bytes * MAX_SHARE)
        held = [] if asks_only else [*client.leased.elements(), *client.filling]
        held_bytes = sum(self._pools.pool(number).memory.stride for number, _ in held)
        return max(0 if held else 1, (most_bytes - held_bytes) // pool.memory.stride)

    def _answer_if_ready(self, client: _Client) -> None:
        assert client.waits is not None
        number, asked = client.waits
        if not asked.is_ready:
            return
        client.waits = None
        try:
            if isinstance(asked, NodeProbe):
                loads = self._pools.pool(number).load_lines
                self._send(client, Op.PROBE, messages.pack_held(asked.tiers, loads))
            elif isinstance(asked, Operated):
                self._send(client, client.asked, messages.pack_json(asked.answer()))
            else:
                frames = self._pools.pool(number).settle(asked)
                client.leased.update((number, frame) for frame in frames)
                self._send(client, Op.LEASE, messages.pack_numbers(frames))
        except OSError:
            self._end(client)

    def _handle_frames(self, client: _Client, op: Op, body: memoryview) -> None:
        number, *frames = messages.unpack_numbers(body) or [0]
        pool = self._pools.pool(number)
        names = [(number, frame) for frame in frames]
        if op is Op.COMMIT:
            if len(set(names)) != len(names) or not client.filling.issuperset(names):
                raise NodeError("a client committed frames that it had not reserved")
            client.filling.difference_update(names)
            pool.commit(frames)
        else:
            if not Counter(names) <= client.leased:
                raise NodeError("a client released frames that it had not leased")
            client.leased -= Counter(names)
            pool.release(frames)
        self._send(client, op, b"")

    def _lock(self, client: _Client, asked: Sequence[int]) -> None:
        if len(asked) != 2:
            raise NodeError("a client locks one piece at a time")
        number, piece = asked
        pool = self._pools.pool(number)
        if piece * pool.memory.piece_frames >= pool.memory.num_frames:
            raise NodeError(f"there is no piece {piece}; see HELLO")
        held = (number, piece) in client.locked or pool.arena.lock(piece)
        if held:
            client.locked.add((number, piece))
        self._send(client, Op.LOCK, bytes([held]))

    def stats(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "num_clients": len(self._clients),
            "num_listeners": self.stream.num_subscribers,
            **self._pools.stats(),
        }


def _listener_at(path: Path, held: contextlib.ExitStack) -> socket.socket:
    """A socket that listens at `path`, replacing one that a dead node has left."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"{path.parent} cannot be used: {error.strerror}; name another folder with --socket"
        ) from error
    held.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise DirectoryLocked(f"another node serves {path}; stop it, or name another") from error
    if path.exists() and not path.is_socket():
        raise ConfigurationError(f"{path} exists and is not a socket; name another with --socket")
    listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        held.callback(path.unlink, missing_ok=True)
        path.chmod(0o600)
    except OSError as error:
        raise ConfigurationError(f"the node cannot listen on {path}: {error}") from error
    listener.listen(64)
    listener.setblocking(False)
    return listener


def _locked(folder: Path) -> DirectoryLock:
    """A lock on the folder, as nodes with different sockets could open the same layouts."""
    make_root(folder)
    try:
        return DirectoryLock(folder)
    except DirectoryLocked as error:
        raise DirectoryLocked(
            f"{folder} is served by {read_holder(folder)}; stop that node, or name another "
            "--disk-cache-dir"
        ) from error


def _owners(document: Any) -> dict[PrefixKey, str]:
    """Parse names by scope. Raises NodeError for anything else."""
    try:
        found = {PrefixKey(bytes.fromhex(scope)): name for scope, name in document.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise NodeError(f"owners are names by scope: {error!r}") from error
    if any(len(scope) != KEY_BYTES for scope in found) or any(
        not isinstance(name, str) or not 0 < len(name) <= MAX_NAME for name in found.values()
    ):
        raise NodeError(f"owners have names of 1 to {MAX_NAME} characters by scopes of 16 bytes")
    return found
