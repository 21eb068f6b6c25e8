"""The tree of prefixes as the rows of a table, with what each has saved and costs to keep. Pure."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from api.cache.explorer import Grown
from api.cache.owners import Owner
from billing.errors import BillingError
from billing.prices.book import PriceBook
from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import TreeNode
from tiers.tier import TierName

if TYPE_CHECKING:
    from api.admin.parts import AdminParts

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Costs:
    """Prices to value a prefix by: what a hit saves a client now, and what a GiB costs a month."""

    block_bytes: int
    book: PriceBook | None = None
    gib_month: Mapping[str, int] = field(default_factory=dict)  # units, by tier; what is known

    @classmethod
    def of(cls, parts: "AdminParts", block_bytes: int) -> "Costs":
        book = parts.books.accounts.book if parts.books is not None else None
        return cls(block_bytes, book, parts.gib_month)

    def saved(self, owner: Owner | None, tier: str, hit_tokens: int) -> tuple[int, str] | None:
        """About what these hits saved clients, at today's price; None where there is no price."""
        if self.book is None or owner is None:
            return None
        try:
            pinned = self.book.at(owner.model, time.time_ns())
        except BillingError:
            return None
        rates = pinned.rates
        hit = getattr(rates, f"hit_{tier}", rates.hit_device)
        return hit_tokens * (rates.miss - hit), pinned.currency

    def keeping(self, places: list[str]) -> int | None:
        """Units a month that blocks in these places cost to keep; None where no price is set."""
        if not self.gib_month:
            return None
        return sum(self.gib_month.get(place, 0) for place in places) * self.block_bytes // GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node. `level` counts from 0 below the scope; `left_off` continue it and are not shown."""

    level: int
    key: str | None
    last: str | None
    num_blocks: int
    num_tokens: int
    nbytes: int
    runs: list[tuple[str, int]]
    num_in_use: int
    hits: int
    idle_s: float
    age_s: float
    saved: int | None
    keeping: int | None
    left_off: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeRows:
    """A scope, its sums, and its rows from the top down."""

    root: str
    owner: Owner | None
    currency: str
    rows: list[Row]
    left_off: int

    @property
    def num_blocks(self) -> int:
        return sum(row.num_blocks for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def saved(self) -> int:
        return sum(row.saved or 0 for row in self.rows)


def rows_of(grown: Grown, costs: Costs, *, min_idle_s: float = 0.0) -> list[ScopeRows]:
    """Every scope with its rows; with `min_idle_s` only what nobody used for so long."""
    scopes = []
    for root in grown.tree.roots:
        key = root.last or PrefixKey(b"")
        owner = grown.owners.get(key)
        rows = [
            row
            for child in root.children
            for row in _walk(child, owner, costs, 0)
            if row.idle_s >= min_idle_s
        ]
        if rows or root.left_off:
            value = costs.saved(owner, TierName.DEVICE, 0)
            scopes.append(
                ScopeRows(
                    root=key.hex(),
                    owner=owner,
                    currency=value[1] if value is not None else "",
                    rows=rows,
                    left_off=root.left_off,
                )
            )
    return scopes


def _walk(node: TreeNode, owner: Owner | None, costs: Costs, level: int) -> Iterator[Row]:
    saved = costs.saved(owner, node.places[0], node.hit_tokens)
    yield Row(
        level=level,
        key=node.key.hex() if node.key else None,
        last=node.last.hex() if node.last else None,
        num_blocks=node.num_blocks,
        num_tokens=node.num_tokens,
        nbytes=node.num_blocks * costs.block_bytes,
        runs=node.runs,
        num_in_use=node.num_in_use,
        hits=node.hits,
        idle_s=node.idle_s,
        age_s=node.age_s,
        saved=saved[0] if saved is not None else None,
        keeping=costs.keeping(node.places),
        left_off=node.left_off,
    )
    for child in node.children:
        yield from _walk(child, owner, costs, level + 1)
