"""Operators' commands on the blocks of one layout in a node: pin, purge, evict, publish.

Pins are those of `tiers.operations.pins`, as in the embedded engine, saved in a file beside the
disk. A purge removes the blocks of some scopes from memory. After the writes under way, it removes
them from the tiers below, and then it checks every block once more. The scopes stay closed until
the purging client opens them or leaves, because a running request may store its blocks later. The
node's thread only.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.disk.pin_file import load_pins, pin_fields, save_pins
from tiers.errors import NodeError
from tiers.node.below import disk_folder
from tiers.node.pool import Pool
from tiers.node.settings import NodeSettings
from tiers.operations.below import ask_writer, done
from tiers.operations.evictions import Evictions
from tiers.operations.pins import Keeper
from tiers.operations.purge import Purged, Purger
from tiers.policy.quota import QuotaShares
from tiers.policy.retention import Pin, PinError
from tiers.steady_clock import SteadyClock
from tiers.tier import ManagedTier

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


@dataclass(slots=True, eq=False)
class PoolOperations:
    """Operators' commands on one pool. `below` is the tier that `pool.mover` writes to."""

    pool: Pool
    below: ManagedTier | None
    folder: Path | None  # of the disk, where pins are kept
    capacity_blocks: int  # of the lowest tier
    closed: dict[int, frozenset[PrefixKey]] = field(default_factory=dict)  # scopes, by client
    shares: QuotaShares | None = None
    saved: "Future[None]" = field(default_factory=Future)
    keeper: Keeper = field(init=False)
    purger: Purger = field(init=False)
    evictions: Evictions = field(init=False)

    def __post_init__(self) -> None:
        self.saved.set_result(None)
        self.keeper = Keeper(
            self.pool.residency,
            max_blocks=int(PINNED_SHARE * self.capacity_blocks),
            block_tokens=self.pool.memory.layout.block_size,
            write=self.pool.write,
            keep_below=self.below.keep if self.below is not None else lambda keys: None,
            changed=self._save,
            clock=SteadyClock(),
            most_owned=self._most_owned,
        )
        self.purger = Purger(self.pool.residency, self.pool.mover, self.keeper.unpin_scopes)
        self.evictions = Evictions(self.pool.residency, self.pool.mover)
        if self.folder is not None:
            self.keeper.restore(load_pins(self.folder))

    def step(self) -> None:
        """Do what is due: pins that end, purges and evictions under way."""
        self.keeper.step()
        blocked = self.purger.blocked
        self.purger.step()
        if blocked != self.purger.blocked:
            self._tell_closed()
        self.evictions.step()

    def operate(self, client: int, asked: Mapping[str, Any]) -> Operated:
        """Begin a client's operation. Raises NodeError if it is unknown or malformed."""
        operations = {
            "pin": self._pin,
            "unpin": self._unpin,
            "pins": self._pins,
            "saved": self._saved,
            "evict": self._evict,
            "trace": self._trace,
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

    def publish(self, keys: Sequence[PrefixKey]) -> Operated:
        """Send a prefix to the store that machines share. The answer counts the leading blocks
        there."""
        if self.below is None or not self.below.is_shared:
            return Operated(done({"published": 0}))
        if any(self.pool.is_unwritten(key) for key in keys):
            return Operated(done({"published": 0}))
        answer: Future[dict[str, Any]] = Future()

        def tell(sent: "Future[int]") -> None:
            answer.set_result({"published": sent.result()})
            self.pool.wake()

        self.below.publish(keys).add_done_callback(tell)
        return Operated(answer)

    def _most_owned(self, scope: PrefixKey) -> int | None:
        most = PINNED_SHARE * self.capacity_blocks
        return self.shares.part_of(scope, most) if self.shares is not None else None

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

    def _unpin(self, asked: Mapping[str, Any]) -> "Future[dict[str, Any]]":
        return done({"found": self.keeper.unpin(str(asked["name"]))})

    def _pins(self, asked: Mapping[str, Any]) -> "Future[dict[str, Any]]":
        pins = [pin_fields(pin) for pin in self.keeper.pins()]
        return done({"pins": pins, "now_s": self.keeper.clock()})

    def _saved(self, asked: Mapping[str, Any]) -> "Future[dict[str, Any]]":
        answer: Future[dict[str, Any]] = Future()

        def tell(saved: "Future[None]") -> None:
            error = saved.exception()
            answer.set_exception(error) if error else answer.set_result({})
            self.pool.wake()

        self.saved.add_done_callback(tell)
        return answer

    def _save(self, pins: Sequence[Pin[PrefixKey]]) -> None:
        folder = self.folder
        if folder is not None:
            self.saved = ask_writer(self.pool.mover, lambda tier: save_pins(folder, pins), None)

    def _evict(self, asked: Mapping[str, Any]) -> "Future[Any]":
        return self.evictions.evict(_keys(asked["keys"]))

    def _trace(self, asked: Mapping[str, Any]) -> "Future[dict[str, Any]]":
        """The identity of each of these blocks and of all before them, as far as they are held."""
        found: dict[PrefixKey, BlockId] = {}
        missing: list[PrefixKey] = []
        for key in _keys(asked["keys"]):
            at = key
            while at not in found and (block := self.pool.residency.index.get(at)) is not None:
                found[at] = block.identity()
                at = found[at].parent
            missing.append(at)
        answer: Future[dict[str, Any]] = Future()

        def tell(traced: "Future[None]") -> None:
            if (error := traced.exception()) is not None:
                answer.set_exception(error)
                return
            answer.set_result(
                {"blocks": [[part.hex() for part in each] for each in found.values()]}
            )
            self.pool.wake()

        below = ask_writer(self.pool.mover, lambda tier: _traced(tier, missing, found), None)
        below.add_done_callback(tell)
        return answer

    def _purge(self, client: int, roots: Sequence[PrefixKey]) -> "Future[dict[str, Any]]":
        wanted = frozenset(roots)
        self.closed[client] = self.closed.get(client, frozenset()) | wanted
        self._tell_closed()
        answer: Future[dict[str, Any]] = Future()

        def tell(done: "Future[Purged]") -> None:
            if (error := done.exception()) is not None:
                answer.set_exception(error)
                return
            purged = asdict(done.result())
            del purged["roots"]
            answer.set_result(purged)

        self.purger.start(wanted).add_done_callback(tell)
        return answer

    def _tell_closed(self) -> None:
        closed = frozenset(root for roots in self.closed.values() for root in roots)
        self.pool.closed = closed | self.purger.blocked


def operations_on(
    pool: Pool, below: ManagedTier | None, settings: NodeSettings, shares: QuotaShares | None
) -> PoolOperations:
    """Make the operations of a pool. Its lowest tier on this machine bounds how much may be
    pinned."""
    layout = pool.memory.layout
    if below is None or settings.disk_dir is None:
        return PoolOperations(pool, None, None, pool.memory.num_frames, shares=shares)
    num_blocks = settings.disk_bytes // layout.nbytes
    folder = disk_folder(settings.disk_dir, layout)
    return PoolOperations(pool, below, folder, num_blocks, shares=shares)


def _traced(
    tier: ManagedTier,
    keys: Sequence[PrefixKey],
    found: dict[PrefixKey, BlockId],
) -> None:
    """Add to `found` the blocks below memory that end with these keys. Writer thread."""
    for key in keys:
        at = key
        while at not in found and (block := tier.trace(at)) is not None:
            found[at], at = block, block.parent


def _keys(names: Collection[str]) -> list[PrefixKey]:
    keys = [PrefixKey(bytes.fromhex(key)) for key in names]
    if any(len(key) != 16 for key in keys):
        raise ValueError("a key has 16 bytes")
    return keys
