"""The tree of prefixes as the rows of a table, with each one's savings and storage cost. Pure.

An end of one block, or of a partly filled block, is folded into the row that it continues. Such
ends are the questions asked after a document, and would hide the document.
"""

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

from api.cache.explorer import Grown
from api.cache.owners import Owner
from billing.errors import BillingError
from billing.prices.book import PriceBook, Terms
from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import TreeNode
from tiers.blocks.view import COMPUTING, LOADING
from tiers.tier import TierName

if TYPE_CHECKING:
    from api.admin.parts import AdminParts

GIB = 1 << 30
LABEL_TOKENS = 12  # of a row, shown as its first words
OUTLINE_TOKENS = 1 << 20  # of a row, searched for messages; more than any prompt has
LABEL_MESSAGES = 3
TIERS: Final = (TierName.DEVICE, TierName.HOST, TierName.DISK)
Decode = Callable[[Sequence[int]], str]
Outline = Callable[[Sequence[int]], Sequence[tuple[str, int]]]
Strip = tuple[str, int, int, int]  # class of its colour, lane, first block, number of blocks


@dataclass(frozen=True, slots=True)
class Costs:
    """Prices of a prefix: what a hit saves its owner now, and what a GiB costs a month."""

    block_bytes: int
    book: PriceBook
    gib_month: Mapping[str, int]  # units of `currency`, by tier, where known
    currency: str

    @classmethod
    def of(cls, parts: "AdminParts", block_bytes: int) -> "Costs":
        book = parts.books.accounts.book
        return cls(block_bytes, book, parts.gib_month, parts.cost_currency())

    def saved(self, owner: Owner | None, tier: str, hit_tokens: int) -> int | None:
        """Estimated savings of these hits at the owner's price of today, in its currency; None
        without a price."""
        if owner is None or not owner.currency:
            return None
        terms = Terms(tenant="" if owner.is_group else owner.name)
        try:
            rates = self.book.at(owner.model, time.time_ns(), owner.currency, terms).rates
        except BillingError:
            return None
        return hit_tokens * (rates.miss - getattr(rates, f"hit_{tier}", rates.hit_device))

    def keeping(self, places: list[str]) -> int | None:
        """Units a month to keep blocks in these places; None if no price is set."""
        if not self.gib_month:
            return None
        return sum(self.gib_month.get(place, 0) for place in places) * self.block_bytes // GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRow:
    """One node, together with the `num_folded` short ends that continue it.

    `level` counts from 0 below the scope. `left_off` blocks continue the node and are not shown.
    `strips` and `num_in` say where its own blocks are. `label` is its first words if they may be
    shown, else the roles and sizes of its messages.
    """

    level: int
    key: str | None
    last: str | None
    num_blocks: int
    num_tokens: int
    nbytes: int
    strips: list[Strip]
    num_in: dict[str, int]
    num_in_use: int
    hits: int
    idle_s: float
    age_s: float
    saved: int | None
    keeping: int | None
    left_off: int
    num_folded: int
    label: str


def _less_in(tier: str, row: PrefixRow) -> float:
    return -row.num_in.get(tier, 0)


SORTS: Final[Mapping[str, Callable[[PrefixRow], float]]] = {
    "tokens": lambda row: -row.num_tokens,
    "size": lambda row: -row.nbytes,
    "hits": lambda row: -row.hits,
    "used": lambda row: row.idle_s,
    "age": lambda row: -row.age_s,
    "saved": lambda row: -(row.saved or 0),
    "keeping": lambda row: -(row.keeping or 0),
    **{tier: partial(_less_in, tier) for tier in TIERS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeRows:
    """A scope and its rows from the top down. Its totals are those of its rows."""

    root: str
    owner: Owner | None
    currency: str
    cost_currency: str
    rows: list[PrefixRow]
    left_off: int

    @property
    def is_whole(self) -> bool:
        """Whether its rows are all that the scope holds."""
        return not self.left_off and not any(row.left_off for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def saved(self) -> int:
        return sum(row.saved or 0 for row in self.rows)


def rows_of(
    grown: Grown,
    costs: Costs,
    *,
    min_idle_s: float = 0.0,
    sort: str = "",
    decode: Decode | None,
    outline: Outline,
) -> list[ScopeRows]:
    """Every scope with its rows; with `min_idle_s` only rows unused for that long.

    Rows that continue the same prefix are in the order of SORTS[sort].
    """
    scopes = []
    for root in grown.tree.roots:
        key = root.last or PrefixKey(b"")
        owner = grown.owners.get(key)
        walk = _Walk(owner, costs, SORTS.get(sort), decode, outline)
        rows = [row for row in walk.below(root.children, 0, "") if row.idle_s >= min_idle_s]
        if rows or root.left_off:
            has_price = costs.saved(owner, TierName.DEVICE, 0) is not None
            scopes.append(
                ScopeRows(
                    root=key.hex(),
                    owner=owner,
                    currency=owner.currency if owner and has_price else "",
                    cost_currency=costs.currency,
                    rows=rows,
                    left_off=root.left_off,
                )
            )
    return scopes


Messages = list[tuple[str, int, bool]]  # role, tokens, and whether it began in an earlier node


@dataclass(frozen=True, slots=True)
class _Walk:
    owner: Owner | None
    costs: Costs
    order: Callable[[PrefixRow], float] | None
    decode: Decode | None
    outline: Outline

    def below(self, nodes: Sequence[TreeNode], level: int, role: str) -> Iterator[PrefixRow]:
        """These nodes, each followed by its continuations. `role` is the preceding message's."""
        rows = []
        for node in nodes:
            messages = self._messages(node, role)
            rows.append((self._row(node, level, messages), node, messages))
        if (order := self.order) is not None:
            rows.sort(key=lambda each: order(each[0]))
        for row, node, messages in rows:
            yield row
            longer = [each for each in node.children if not _is_end(each)]
            yield from self.below(longer, level + 1, messages[-1][0] if messages else "")

    def _row(self, node: TreeNode, level: int, messages: Messages) -> PrefixRow:
        ends = [each for each in node.children if _is_end(each)]
        nodes = [node, *ends]
        num_blocks = sum(each.num_blocks for each in nodes)
        values = [self._saved(each) for each in nodes]
        keeping = [self.costs.keeping(each.places) for each in nodes]
        return PrefixRow(
            level=level,
            key=node.key.hex() if node.key else None,
            last=node.last.hex() if node.last else None,
            num_blocks=node.num_blocks,
            num_tokens=sum(each.num_tokens for each in nodes),
            nbytes=num_blocks * self.costs.block_bytes,
            strips=_strips(node),
            num_in=node.num_in,
            num_in_use=sum(each.num_in_use for each in nodes),
            hits=node.hits,
            idle_s=min(each.idle_s for each in nodes),
            age_s=node.age_s,
            saved=None if None in values else sum(value or 0 for value in values),
            keeping=None if None in keeping else sum(units or 0 for units in keeping),
            left_off=node.left_off,
            num_folded=len(ends),
            label=self._label(node, messages),
        )

    def _saved(self, node: TreeNode) -> int | None:
        return self.costs.saved(self.owner, node.places[0], node.hit_tokens)

    def _messages(self, node: TreeNode, role: str) -> Messages:
        """The messages of a node. Without a mark, the first one continues a message of this
        `role`."""
        messages = self.outline(array("i", node.tokens))
        return [(name or role, size, not name) for name, size in messages]

    def _label(self, node: TreeNode, messages: Messages) -> str:
        if self.decode is not None:
            return " ".join(self.decode(array("i", node.tokens)[:LABEL_TOKENS]).split())
        if not any(role for role, _, _ in messages):
            return ""
        shown = [
            " ".join(filter(None, ("…" if begun else "", role, f"{size:,}")))
            for role, size, begun in messages[:LABEL_MESSAGES]
        ]
        rest = len(messages) - LABEL_MESSAGES
        return ", ".join([*shown, f"{rest} more"] if rest > 0 else shown)


def _is_end(node: TreeNode) -> bool:
    """Whether the node is one block, or a partly filled one, without continuations."""
    return node.num_blocks == 1 and not node.children and not node.left_off


def _strips(node: TreeNode) -> list[Strip]:
    """Where the blocks are, with a lane per tier, because several tiers may hold a block."""
    strips: list[Strip] = []
    for lane, tier in enumerate(TIERS):
        at = 0
        for held, blocks in groupby(tier in tiers for tiers in node.tiers):
            count = len(list(blocks))
            if held:
                strips.append((tier, lane, at, count))
            at += count
    for at, place in enumerate(node.places):
        if place in (COMPUTING, LOADING):
            strips.append((place, 0, at, 1))
    return strips
