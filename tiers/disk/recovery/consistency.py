"""Checks whether a shard's databases agree about its blocks, and finds what to change if not.

`ShardSums` adds up entries in one pass with constant memory: equal sums mean agreement. `Repair` is
for the rare other case and holds every key. Pure except for the pages it reads.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import xxhash

from tiers.blocks.keys import PrefixKey
from tiers.disk.format.record import Header, num_blocks_of, record_key, unpack_header
from tiers.disk.format.rows import Account, IndexEntry, Totals, unpack_order, unpack_sequence
from tiers.disk.recovery.page import HEADER, PAGE, run_pages
from tiers.disk.recovery.pages import LmdbTree, Node, PageFile

DAMAGED = (ValueError, struct.error)  # errors from rows of the wrong length or content
_MASK = (1 << 128) - 1
_MOST = 1 << 62  # no counter gets that high


@dataclass(slots=True)
class Fixes:
    """The changes that make the databases agree; empty if they do."""

    # blocks to delete, each with the first page of its record (0: none) and its length
    keys: list[tuple[PrefixKey, int, int]] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)  # sequences in the order without a block
    places: list[tuple[int, PrefixKey, int]] = field(default_factory=list)  # missing from the order
    totals: Totals | None = None
    accounts: dict[PrefixKey, Account] | None = None

    def __bool__(self) -> bool:
        rows = self.keys or self.sequences or self.places
        return bool(rows) or self.totals is not None or self.accounts is not None


class ShardSums:
    """Sums over the databases' entries for the same blocks. Different sums mean damage."""

    def __init__(self, file: PageFile) -> None:
        self._file = file
        self._sums = dict.fromkeys(("data", "index", "places", "order"), 0)
        self._totals = Totals()
        self._accounts: dict[PrefixKey, Account] = {}
        self._stood: dict[PrefixKey, Account] = {}
        self._last_sequence = 0
        self._stands: Totals | None = None
        self._bad = False

    def take(self, name: str, node: Node) -> None:
        try:
            value = b"" if name == "data" else self._file.value(node)
            getattr(self, f"_{name}")(node, value)
        except DAMAGED:
            self._bad = True

    def agree(self) -> bool:
        sums, stands = self._sums, self._stands or Totals()
        return (
            not self._bad
            and sums["data"] == sums["index"]
            and sums["places"] == sums["order"]
            and self._totals[:3] == stands[:3]
            and self._last_sequence < stands.next_sequence < _MOST
            and max(stands) < _MOST
            and self._accounts == self._stood
        )

    def _add(self, name: str, key: bytes, *numbers: int) -> None:
        row = key + b"".join(number.to_bytes(8, "little") for number in numbers)
        self._sums[name] = (self._sums[name] + xxhash.xxh3_128_intdigest(row)) & _MASK

    def _data(self, node: Node, _: bytes) -> None:
        self._add("data", node.key, node.run, node.nbytes)

    def _index(self, node: Node, value: bytes) -> None:
        entry, header = proven_entry(node.key, value)
        place = entry.place
        self._add("index", node.key, (place.offset - HEADER) // PAGE, place.nbytes)
        self._add("places", node.key, place.sequence)
        self._last_sequence = max(self._last_sequence, place.sequence)
        gain = (num_blocks_of(node.key), run_pages(place.nbytes) * PAGE, header.logical_nbytes)
        self._totals = _plus(self._totals, gain)
        held = self._accounts.get(header.scope, Account())
        self._accounts[header.scope] = held.plus(*gain)

    def _order(self, node: Node, value: bytes) -> None:
        key, _ = unpack_order(value)
        self._add("order", key, unpack_sequence(node.key))

    def _scopes(self, node: Node, value: bytes) -> None:
        self._stood[PrefixKey(node.key)] = Account.unpack(value)

    def _state(self, node: Node, value: bytes) -> None:
        if node.key == b"totals":
            self._stands = Totals.unpack(value)


class Repair:
    """Finds, entry by entry, the changes that make the databases agree. Holds every key."""

    def __init__(self, file: PageFile, trees: dict[str, LmdbTree]) -> None:
        self._file = file
        self._trees = trees

    def _rows(self, name: str) -> Iterator[tuple[Node, bytes]]:
        for node in self._file.nodes(self._trees[name]):
            yield node, b"" if name == "data" else self._file.value(node)

    def fixes(self) -> Fixes:
        runs = {node.key: (node.run, node.nbytes) for node, _ in self._rows("data")}
        good: dict[PrefixKey, tuple[IndexEntry, Header]] = {}
        bad: dict[bytes, None] = dict.fromkeys(runs)
        for node, value in self._rows("index"):
            bad[node.key] = None
            try:
                entry, header = proven_entry(node.key, value)
            except DAMAGED:
                continue
            run, nbytes = runs.get(node.key, (0, -1))
            if nbytes == entry.place.nbytes and entry.place.offset in (0, run * PAGE + HEADER):
                good[PrefixKey(node.key)] = entry, header
                del bad[node.key]
        fixes = Fixes(keys=[(PrefixKey(key), *runs.get(key, (0, 0))) for key in bad])
        self._fix_order(fixes, good)
        self._fix_accounts(fixes, good)
        return fixes

    def _fix_order(self, fixes: Fixes, good: dict[PrefixKey, tuple[IndexEntry, Header]]) -> None:
        lacking = {key: entry for key, (entry, _) in good.items()}
        for node, value in self._rows("order"):
            try:
                sequence, (key, _) = unpack_sequence(node.key), unpack_order(value)
            except DAMAGED:
                sequence, key = int.from_bytes(node.key[:8].ljust(8, b"\0"), "big"), None
            if key in lacking and lacking[key].place.sequence == sequence:
                del lacking[key]
            else:
                fixes.sequences.append(sequence)
        for key, entry in lacking.items():
            fixes.places.append((entry.place.sequence, key, entry.place.used_s))

    def _fix_accounts(self, fixes: Fixes, good: dict[PrefixKey, tuple[IndexEntry, Header]]) -> None:
        stands = Totals()
        for node, value in self._rows("state"):
            try:
                stands = Totals.unpack(value) if node.key == b"totals" else stands
            except DAMAGED:
                continue
        if max(stands) >= _MOST:
            stands = Totals()
        totals, accounts, last = Totals(), dict[PrefixKey, Account](), 0
        for key, (entry, header) in good.items():
            stored = run_pages(entry.place.nbytes) * PAGE
            gain = (num_blocks_of(key), stored, header.logical_nbytes)
            totals = _plus(totals, gain)
            accounts[header.scope] = accounts.get(header.scope, Account()).plus(*gain)
            last = max(last, entry.place.sequence)
        fixes.totals = stands._replace(
            next_sequence=max(stands.next_sequence, last + 1),
            num_blocks=totals.num_blocks,
            stored_bytes=totals.stored_bytes,
            logical_bytes=totals.logical_bytes,
        )
        fixes.accounts = accounts


def _plus(totals: Totals, gain: tuple[int, int, int]) -> Totals:
    blocks, stored, logical = gain
    return totals._replace(
        num_blocks=totals.num_blocks + blocks,
        stored_bytes=totals.stored_bytes + stored,
        logical_bytes=totals.logical_bytes + logical,
    )


def proven_entry(key: bytes, value: bytes) -> tuple[IndexEntry, Header]:
    """The index entry, if its header is valid and belongs to this key. Raises ValueError."""
    entry = IndexEntry.unpack(value)
    header = unpack_header(entry.header)
    if not isinstance(header, Header) or record_key(header) != key:
        raise ValueError(f"the index entry of {key.hex()} is damaged")
    place = entry.place
    if not 0 < place.sequence < _MOST or (place.offset and place.offset % PAGE != HEADER):
        raise ValueError(f"the place of {key.hex()} cannot be")
    if len(entry.header) != int.from_bytes(entry.header[12:16], "little"):
        raise ValueError(f"the index entry of {key.hex()} is longer than its header")
    if len(entry.header) + header.payload_nbytes > place.nbytes:
        raise ValueError(f"the record of {key.hex()} is longer than its place")
    return entry, header
