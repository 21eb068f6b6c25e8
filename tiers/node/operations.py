"""Operators' commands on the blocks of one layout in a node: pin, purge, evict, publish.

Pins are those of `tiers.operations.pins`, as in the embedded engine, saved in a file beside the
disk. A purge removes the blocks of some scopes from memory. After the writes under way, it removes
them from the tiers below, and then it checks every block once more. The scopes stay closed until
the purging client opens them or leaves, because a running request may store its blocks later. The
node's thread only.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from tiers.blocks.keys import PrefixKey
from tiers.disk.pin_file import pin_fields
from tiers.errors import NodeError
from tiers.node.below import disk_folder
from tiers.node.pool import Pool
from tiers.node.settings import NodeSettings
from tiers.operations.below import done, then
from tiers.operations.operations import TierOperations
from tiers.policy.retention import PinError
from tiers.steady_clock import SteadyClock
from tiers.tier import ManagedTier, Purged, TierName

PINNED_SHARE = 1 / 4  # share of the lowest tier that pins may take
LONGEST_QUOTED = 500  # characters of a refused request that its error repeats


@dataclass(slots=True, eq=False)
class Operated:
    """The pending answer to an operation. Ready once the writer thread below is done."""

    future: "Future[dict[str, Any]]"

    @property
    def is_ready(self) -> bool:
        return self.future.done()

    def answer(self) -> dict[str, Any]:
        """The answer. A failure is part of the answer and does not end the connection."""
        try:
            return self.future.result()
        except Exception as error:  # noqa: BLE001 - the asker's to handle
            return {"failed": str(error)}


class PoolOperations(TierOperations):
    """Operators' commands on one pool, as its clients send them."""

    def __init__(
        self, pool: Pool, below: ManagedTier | None, folder: Path | None, capacity_blocks: int
    ) -> None:
        """`below` is the tier that `pool.mover` writes to, and `folder` is where it keeps pins.
        `capacity_blocks` are those of the lowest tier on this machine, which bound how much may be
        pinned."""
        quotas, lowest = pool.capacity.quotas, below.name if below is not None else TierName.HOST
        super().__init__(
            pool.residency,
            pool.demoter,
            pool.mover,
            below,
            capacities={lowest: capacity_blocks},
            quotas={TierName.HOST: quotas} if quotas is not None else {},
            pinned_share=PINNED_SHARE,
            pin_folder=folder,
            wall_clock=SteadyClock(),
        )
        self.pool = pool
        self.closed: dict[int, frozenset[PrefixKey]] = {}  # scopes, by client

    def step(self) -> None:
        blocked = self.purger.blocked
        super().step()
        if blocked != self.purger.blocked:
            self._tell_closed()

    def operate(self, client: int, asked: Mapping[str, Any]) -> Operated:
        """Begin a client's operation. Raises NodeError if it is unknown or malformed."""
        operations: Mapping[str, Callable[[Mapping[str, Any]], Future[Any]]] = {
            "pin": self._pin,
            "unpin": lambda asked: done({"found": self.keeper.unpin(str(asked["name"]))}),
            "pins": lambda _: done(
                {"pins": [*map(pin_fields, self.keeper.pins())], "now_s": self.keeper.clock()}
            ),
            "saved": lambda _: then(self.saved(), lambda _: {}),
            "evict": lambda asked: self.evict(_keys(asked["keys"])),
        }
        try:
            what = asked["do"]
            if what == "purge":
                return Operated(self._purge(client, _keys(asked["roots"])))
            if what == "open":
                self.closed.pop(client, None)
                self._tell_closed()
                return Operated(done({}))
            return Operated(operations[what](asked))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            quoted = f"{dict(asked)!r}"[:LONGEST_QUOTED]
            raise NodeError(f"{quoted} is not an operation: {error!r}") from error

    def send(self, keys: Sequence[PrefixKey]) -> Operated:
        """Send a prefix to the store that machines share; how many leading blocks it has."""
        sent = done(0)
        if self._disk is not None and not any(map(self.pool.is_unwritten, keys)):
            sent = self._disk.publish(keys)
        return Operated(then(sent, lambda count: {"published": count}, self.pool.wake))

    def leave(self, client: int) -> None:
        """Open the scopes that a client had closed, because it has left. Those of a purge under way
        open at its end."""
        if self.closed.pop(client, None) is not None:
            self._tell_closed()

    def _pin(self, asked: Mapping[str, Any]) -> "Future[dict[str, Any]]":
        now_s, for_s = self.keeper.clock(), float(asked["for_s"])
        if not isfinite(for_s):
            raise ValueError(f"a pin for {for_s} seconds")
        try:
            pin = self.keeper.pin(
                str(asked["name"]),
                PrefixKey(bytes.fromhex(asked["scope"])),
                _keys(asked["keys"]),
                now_s + for_s,
                str(asked["why"]),
                owner=str(asked["owner"]),
                num_tokens=int(asked["num_tokens"]) if "num_tokens" in asked else None,
            )
        except PinError as error:
            return done({"refused": str(error), "excess": error.excess})
        return done({"pin": pin_fields(pin)})

    def _purge(self, client: int, roots: Sequence[PrefixKey]) -> "Future[dict[str, Any]]":
        wanted = frozenset(roots)
        self.closed[client] = self.closed.get(client, frozenset()) | wanted
        self._tell_closed()

        def as_json(purged: Purged) -> dict[str, Any]:
            return {name: value for name, value in asdict(purged).items() if name != "roots"}

        return then(self.purge(wanted), as_json)

    def _tell_closed(self) -> None:
        closed = frozenset(root for roots in self.closed.values() for root in roots)
        self.pool.closed = closed | self.purger.blocked


def operations_on(pool: Pool, below: ManagedTier | None, settings: NodeSettings) -> PoolOperations:
    layout = pool.memory.layout
    if below is None or settings.disk_dir is None:
        return PoolOperations(pool, None, None, pool.memory.num_frames)
    num_blocks = settings.disk_bytes // layout.nbytes
    return PoolOperations(pool, below, disk_folder(settings.disk_dir, layout), num_blocks)


def _keys(names: Collection[str]) -> list[PrefixKey]:
    keys = [PrefixKey(bytes.fromhex(key)) for key in names]
    if any(len(key) != 16 for key in keys):
        raise ValueError("a key has 16 bytes")
    return keys
