"""An engine's connection to a node: one blocking socket, and a mapping of the node's memory.

Not thread-safe: each thread that talks to a node has its own client. Every failure is a NodeGone or
a NodeError. After a failure the connection is closed and every lease is over; `connect` starts
again. Frames stay readable after the node has died, since the memory is shared.
"""

import contextlib
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.errors import NodeError, NodeGone
from tiers.node import messages
from tiers.node.arena import SharedMemory
from tiers.node.messages import HEADER, MAX_BODY, VERSION, Op, run_of
from tiers.tier import TierName
from tiers.transfer.economy import CostLine

_PEER = struct.Struct("3i")  # pid, uid, gid


class NodeClient:
    """One connection to the node at `path`, for blocks of one layout or only for its counters. It
    moves blocks if it `maps` the node's memory, which then outlives the node."""

    def __init__(
        self,
        path: Path,
        layout: BlockLayout | None = None,
        *,
        timeout_s: float = 10.0,
        maps: bool = True,
    ) -> None:
        self._path = path
        self._maps = maps
        self._layout = layout
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._pool = 0
        self.memory: SharedMemory | None = None  # while connected
        self.loads: Mapping[TierName, CostLine] = {}  # seconds by bytes, as of the last probe

    @property
    def is_connected(self) -> bool:
        """Whether the node still has this connection. It says nothing there unasked."""
        if self._socket is None:
            return False
        news = select.poll()
        news.register(self._socket, select.POLLIN)
        return not news.poll(0)

    @property
    def peer(self) -> int:
        """The process id of the node. Raises NodeGone if none answers."""
        if self._socket is None:
            raise NodeGone(f"not connected to the node at {self._path}")
        size = _PEER.size
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(_PEER.unpack(credentials)[0])

    def answer_within(self, timeout_s: float) -> None:
        """From now on, a later answer counts as the node's end."""
        self._timeout_s = timeout_s
        if self._socket is not None:
            self._socket.settimeout(timeout_s)

    def connect(self) -> None:
        """Join the node. Raises NodeGone if none answers."""
        assert self._layout is not None, "blocks have a layout"
        self.open()
        hello = {"version": VERSION, "layout": messages.describe_layout(self._layout)}
        answer, files = self._ask(Op.HELLO, messages.pack_json(hello))
        fields = messages.unpack_json(answer)
        if len(files) != 1:
            self.close()
            raise NodeError("the node sent no memory")
        self._pool = fields["pool"]
        sizes = fields["num_frames"], fields["piece_frames"]
        if self._maps:
            self.memory = SharedMemory(files[0], self._layout, *sizes)
        else:
            os.close(files[0])

    def open(self) -> None:
        """Connect to the node without a layout. Raises NodeGone if none answers."""
        self.close()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.connect(str(self._path))
        except OSError as error:
            self.close()
            raise NodeGone(f"no node answers at {self._path}: {error}") from error

    def probe(self, ids: Sequence[BlockId]) -> list[TierName]:
        """The tier of each block in the leading run that the node holds."""
        if not ids:
            return []
        tiers, self.loads = messages.unpack_held(self._run(Op.PROBE, ids))
        return tiers

    def fetch(self, ids: Sequence[BlockId]) -> None:
        """Have this run loaded into memory, because it will be leased soon. No answer comes."""
        if ids:
            self._run(Op.FETCH, ids)

    def lease(self, ids: Sequence[BlockId]) -> list[int]:
        """Frames of the leading run that the node holds, filled and kept until `release`."""
        return list(messages.unpack_numbers(self._run(Op.LEASE, ids))) if ids else []

    def release(self, frames: Sequence[int]) -> None:
        """Return leased frames, in the order of their blocks."""
        if frames:
            self._ask(Op.RELEASE, messages.pack_numbers([self._pool, *frames]))

    def reserve(self, ids: Sequence[BlockId]) -> list[tuple[int, int]]:
        """Reserve frames for new blocks: (position in `ids`, frame) of each block to write."""
        return messages.unpack_pairs(self._run(Op.RESERVE, ids)) if ids else []

    def commit(self, frames: Sequence[int]) -> None:
        """Publish reserved frames that have been written. The node serves them from now on."""
        if frames:
            self._ask(Op.COMMIT, messages.pack_numbers([self._pool, *frames]))

    def lock(self, piece: int) -> bool:
        """Ask to lock the memory of a piece of frames for a GPU. True: the node keeps its pages
        until this connection ends. Unlock them before."""
        return self._ask(Op.LOCK, messages.pack_numbers([self._pool, piece]))[0] == b"\1"

    def operate(self, what: str, **about: Any) -> dict[str, Any]:
        """Run an operator's command on this layout's blocks; see `tiers.node.operations`. Raises
        NodeError if the node cannot do it."""
        return self._tell({"pool": self._pool, "do": what, **about})

    def know(self, owners: Mapping[PrefixKey, str]) -> None:
        """Tell the node the owners of these scopes, for its quotas."""
        self._tell({"do": "owners", "owners": {key.hex(): name for key, name in owners.items()}})

    def publish(self, ids: Sequence[BlockId]) -> int:
        """Send these blocks to the store that machines share. Returns how many leading ones it has
        now.

        That is fewer than all while some are still being written to the node's disk. Ask again
        then.
        """
        return int(_answer_of(self._run(Op.PUBLISH, ids)).get("published", 0)) if ids else 0

    def stats(self) -> dict[str, Any]:
        return messages.unpack_json(self._ask(Op.STATS, b"")[0])

    def close(self) -> None:
        """Leave the node. It takes back every lease and drops blocks that were not committed."""
        if self.memory is not None:
            memory, self.memory = self.memory, None
            memory.close()  # first: locked memory is unlocked while the node still keeps it
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return _answer_of(self._ask(Op.OPERATE, messages.pack_json(asked))[0])

    def _run(self, op: Op, ids: Sequence[BlockId]) -> bytes:
        return self._ask(op, messages.pack_run(self._pool, run_of(ids)))[0]

    def _ask(self, op: Op, body: bytes) -> tuple[bytes, list[int]]:
        """Send one request. Returns its answer and the files that came with it."""
        if self._socket is None:
            raise NodeGone(f"not connected to the node at {self._path}")
        try:
            self._socket.sendall(messages.pack(op, body))
            return self._receive(op) if op is not Op.FETCH else (b"", [])
        except OSError as error:
            self.close()
            raise NodeGone(f"the node at {self._path} went away: {error}") from error
        except NodeError:
            self.close()
            raise

    def _receive(self, op: Op) -> tuple[bytes, list[int]]:
        assert self._socket is not None
        data, files, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
        received = bytearray(data)
        try:
            self._fill(received, HEADER.size, bool(data))
            size, answered = HEADER.unpack_from(received)
            if size > MAX_BODY:
                raise NodeError(f"the node sent a message of {size} bytes")
            self._fill(received, HEADER.size + size, True)
        except BaseException:
            for file in files:
                with contextlib.suppress(OSError):
                    os.close(file)
            raise
        answer = bytes(received[HEADER.size :])
        if answered != op:
            raise NodeError(answer.decode(errors="replace") or f"the node answered {answered}")
        return answer, files

    def _fill(self, received: bytearray, size: int, is_open: bool) -> None:
        assert self._socket is not None
        while len(received) < size:
            data = self._socket.recv(min(1 << 20, size - len(received))) if is_open else b""
            if not data:
                raise NodeGone(f"the node at {self._path} closed the connection")
            received += data


def _answer_of(answer: bytes) -> dict[str, Any]:
    fields = messages.unpack_json(answer)
    if "failed" in fields:
        raise NodeError(str(fields["failed"]))
    return fields
