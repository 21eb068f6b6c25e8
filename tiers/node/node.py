"""A node: one thread that serves pools of blocks to clients over a Unix socket.

    client ──request──► Node ──► Pool ──► Mover (disk)         one request at a time a client
           ◄──answer───      ◄── work ◄── wake-up

A probe or a lease that waits for the disk is answered when the disk is done; other clients are
served meanwhile. When a client's connection ends, however it ends, its leases are over and what it
was writing is forgotten. Nothing a client sends can stop the node: a message that it cannot accept
is refused, and the connection is closed.
"""

import contextlib
import fcntl
import logging
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tiers.blocks.layout import BlockLayout
from tiers.errors import ConfigurationError, DirectoryLocked, NodeError
from tiers.node import messages
from tiers.node.arena import create, frame_stride
from tiers.node.below import Below, open_below, stats_below
from tiers.node.messages import HEADER, MAX_BODY, VERSION, Op
from tiers.node.operations import Operated, PoolOperations, operations_on
from tiers.node.pool import Lease, NodeProbe, Pool
from tiers.node.residency import Capacity
from tiers.node.settings import NodeSettings
from tiers.remote.stacked import StackedTier
from tiers.tier import TierName
from tiers.transfer.mover import Mover

logger = logging.getLogger(__name__)

MAX_POOLS = 16  # layouts that one node serves
MAX_CLIENTS = 256
MAX_UNSENT = 1 << 20  # bytes of answers that a client may leave unread and ask on
MAX_SHARE = 1 / 2  # of the memory, that one connection may have leased and reserved at once
DRAIN_S = 30.0  # how long a stopping node writes to its disk what only memory holds
TICK_S = 1.0  # how often pins are looked at
_READ_BYTES = 1 << 18
_TIER_CODES = {TierName.HOST: 0, TierName.DISK: 1, TierName.REMOTE: 2}


@dataclass(slots=True, eq=False)
class _Client:
    """One connection, what it has sent so far, and what it holds."""

    number: int
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    leased: Counter[tuple[int, int]] = field(default_factory=Counter)  # (pool, frame)
    filling: set[tuple[int, int]] = field(default_factory=set)
    waits: "tuple[int, Lease | NodeProbe | Operated] | None" = None
    asked: Op = Op.STATS  # what it waits for


class NodeServer:
    """Serves until `stop`. `open` may raise ConfigurationError and DirectoryLocked."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self._capacity = Capacity(settings.host_bytes)
        self._pools: list[Pool] = []
        self._layouts: list[BlockLayout] = []
        self._below: list[Below] = []
        self._operations: list[PoolOperations] = []
        self._clients: dict[int, _Client] = {}
        self._num_clients = 0
        self._stopping = False

    def open(self) -> None:
        """Take the socket's place. Clients can connect when it returns."""
        self.settings.check()
        path = self.settings.socket
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise DirectoryLocked(
                f"another node serves {path}; stop it, or name another"
            ) from error
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            self._listener.bind(str(path))
            path.chmod(0o600)
        except OSError as error:
            self._listener.close()
            os.close(self._lock)
            raise ConfigurationError(f"the node cannot listen on {path}: {error}") from error
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def stop(self) -> None:
        """End `run` after the step under way. Any thread, and signal handlers."""
        self._stopping = True
        self._wake_up()

    def run(self) -> None:
        """Serve clients until `stop`."""
        while not self._stopping:
            for key, events in self._selector.select(TICK_S if self._operations else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                else:
                    self._attend(key.data, events)
            for pool in self._pools:
                pool.work()
            for operations in self._operations:
                operations.keeper.step()
            for client in [each for each in self._clients.values() if each.waits]:
                self._answer_if_ready(client)

    def close(self) -> None:
        """Write what only memory holds, within `DRAIN_S`, and give everything back."""
        for client in list(self._clients.values()):
            self._end(client)
        self.settings.socket.unlink(missing_ok=True)
        until = time.monotonic() + DRAIN_S
        pools = self._pools
        while any(pool.is_writing for pool in pools) and time.monotonic() < until:
            for pool in pools:
                pool.work()
            time.sleep(0.005)
        for pool in pools:
            if pool.mover is not None:
                pool.mover.close()
            pool.memory.close()
        for below in self._below:
            below.close()
        self._selector.close()
        self._listener.close()
        os.close(self._wake)
        os.close(self._lock)

    # Connections.

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile
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

    def _read(self, client: _Client) -> None:
        data = client.socket.recv(_READ_BYTES)
        if not data:
            self._end(client)
            return
        client.received += data
        if len(client.received) > HEADER.size + MAX_BODY or len(client.unsent) > MAX_UNSENT:
            raise NodeError("a client goes on asking and leaves its answers unread")
        while client.waits is None and len(client.received) >= HEADER.size:
            size, op = HEADER.unpack_from(client.received)
            if size > MAX_BODY:
                raise NodeError(f"a message of {size} bytes; at most {MAX_BODY} are read")
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
        self._end(client)

    def _end(self, client: _Client) -> None:
        """The connection is over: so is everything that it held."""
        if self._clients.pop(client.number, None) is None:
            return
        self._selector.unregister(client.socket)
        client.socket.close()
        if client.waits is not None and isinstance(lease := client.waits[1], Lease):
            self._pools[client.waits[0]].give_up(lease)
        for (pool, frame), count in client.leased.items():
            self._pools[pool].release([frame] * count)
        for pool, frame in client.filling:
            self._pools[pool].abandon([frame])
        for operations in self._operations:
            operations.leave(client.number)

    # Requests.

    def _handle(self, client: _Client, op: int, body: memoryview) -> None:
        if op == Op.HELLO:
            self._hello(client, messages.unpack_json(body))
        elif op in (Op.PROBE, Op.LEASE, Op.RESERVE, Op.PUBLISH):
            self._handle_run(client, Op(op), body)
        elif op in (Op.COMMIT, Op.RELEASE):
            self._handle_frames(client, Op(op), body)
        elif op == Op.OPERATE:
            self._operate(client, messages.unpack_json(body))
        elif op == Op.STATS:
            self._send(client, Op.STATS, messages.pack_json(self.stats()))
        else:
            raise NodeError(f"operation {op} is not known to this version of the node")

    def _hello(self, client: _Client, hello: dict[str, Any]) -> None:
        if hello.get("version") != VERSION:
            raise NodeError(f"the node speaks version {VERSION}, not {hello.get('version')!r}")
        number = self._pool_for(messages.described_layout(hello.get("layout")))
        memory = self._pools[number].memory
        body = messages.pack_json({"pool": number, "num_frames": memory.num_frames})
        answer = messages.pack(Op.HELLO, body)
        if client.unsent or socket.send_fds(client.socket, [answer], [memory.file]) < len(answer):
            raise NodeError("a client said HELLO while it left answers unread")

    def _operate(self, client: _Client, asked: dict[str, Any]) -> None:
        number = asked.get("pool")
        if type(number) is not int or not 0 <= number < len(self._operations):
            raise NodeError(f"there is no pool {number!r}; say HELLO first")
        client.waits = (number, self._operations[number].operate(client.number, asked))
        client.asked = Op.OPERATE
        self._answer_if_ready(client)

    def _handle_run(self, client: _Client, op: Op, body: memoryview) -> None:
        number, run = messages.unpack_run(body)
        pool = self._pool(number)
        if run.block_size != self._layouts[number].block_size:
            raise NodeError(f"blocks of {run.block_size} tokens were asked for; see HELLO")
        ids = run.ids()
        client.asked = op
        if op is Op.PUBLISH:
            keys = [block.key for block in ids]
            client.waits = (number, self._operations[number].publish(keys))
            self._answer_if_ready(client)
            return
        ids = ids[: self._room_of(client, pool, asks_only=op is Op.PROBE)]
        if op is Op.RESERVE:
            pairs = pool.reserve(ids, client.number)
            client.filling |= {(number, frame) for _, frame in pairs}
            self._send(client, op, messages.pack_pairs(pairs))
            return
        asked = pool.probe(ids) if op is Op.PROBE else pool.lease(ids, client.number)
        client.waits = (number, asked)
        self._answer_if_ready(client)

    def _room_of(self, client: _Client, pool: Pool, *, asks_only: bool) -> int:
        """How many more frames of a pool the client may hold: what one engine uses, no other can
        evict. A probe finds no more than may be leased."""
        most_bytes = int(self._capacity.capacity_bytes * MAX_SHARE)
        pools = self._pools
        held = [] if asks_only else [*client.leased.elements(), *client.filling]
        held_bytes = sum(pools[number].memory.stride for number, _ in held)
        return max(0 if held else 1, (most_bytes - held_bytes) // pool.memory.stride)

    def _answer_if_ready(self, client: _Client) -> None:
        assert client.waits is not None
        number, asked = client.waits
        if not asked.is_ready:
            return
        client.waits = None
        try:
            if isinstance(asked, NodeProbe):
                codes = bytes(_TIER_CODES[tier] for tier in asked.tiers)
                self._send(client, Op.PROBE, codes)
            elif isinstance(asked, Operated):
                self._send(client, client.asked, messages.pack_json(asked.told()))
            else:
                frames = self._pools[number].settle(asked)
                client.leased.update((number, frame) for frame in frames)
                self._send(client, Op.LEASE, messages.pack_numbers(frames))
        except OSError:
            self._end(client)

    def _handle_frames(self, client: _Client, op: Op, body: memoryview) -> None:
        number, *frames = messages.unpack_numbers(body) or [0]
        pool = self._pool(number)
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

    def stats(self) -> dict[str, Any]:
        """Counters and sizes, as JSON."""
        pools = [
            {
                "layout": messages.describe_layout(layout),
                "num_blocks": pool.residency.num_blocks,
                "evicted": pool.residency.evicted,
                "lost": pool.residency.lost,
                "is_writing": pool.is_writing,
                "num_pins": len(operations.keeper.pins()),
                "pinned_blocks": operations.keeper.num_blocks,
                "pinnable_blocks": operations.keeper.max_blocks,
                **asdict(pool.counts),
                **stats_below(below),
            }
            for layout, pool, below, operations in zip(
                self._layouts,
                self._pools,
                self._below_by_pool,
                self._operations,
                strict=True,
            )
        ]
        return {
            "version": VERSION,
            "num_clients": len(self._clients),
            "used_bytes": self._capacity.used_bytes,
            "capacity_bytes": self._capacity.capacity_bytes,
            "pools": pools,
        }

    # Pools.

    @property
    def _below_by_pool(self) -> Sequence[Below | None]:
        return self._below or [None] * len(self._layouts)

    def _pool(self, number: int) -> Pool:
        if number >= len(self._pools):
            raise NodeError(f"there is no pool {number}; say HELLO first")
        return self._pools[number]

    def _pool_for(self, layout: BlockLayout) -> int:
        """The pool of a layout, made when it is first asked for."""
        if layout in self._layouts:
            return self._layouts.index(layout)
        if len(self._layouts) >= MAX_POOLS:
            raise NodeError(f"the node serves {MAX_POOLS} block layouts already; start another")
        num_frames = self.settings.host_bytes // frame_stride(layout)
        if not num_frames:
            raise NodeError(
                f"a block of {layout.nbytes} bytes does not fit the node's "
                f"{self.settings.host_bytes} bytes of host memory"
            )
        below = open_below(self.settings, layout) if self.settings.disk_dirs else None
        mover = None
        if below is not None:
            self._below.append(below)
            mover = Mover(below, on_done=self._wake_up)
            mover.start()
        pool = Pool(create(layout, num_frames), self._capacity, mover, wake=self._wake_up)
        if isinstance(below, StackedTier):
            pool.used = below.used
        self._pools.append(pool)
        self._operations.append(operations_on(pool, below, self.settings))
        self._layouts.append(layout)
        return len(self._layouts) - 1
