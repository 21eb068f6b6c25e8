"""The tree of prefixes as the rows of a table, with each one's savings. Pure.

An end of one block, or of a partly filled block, is folded into the row that it continues. Such
ends are the questions asked after a document, and would hide the document.
"""

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from api.admin.parts import AdminParts
from api.cache.explorer import Grown
from api.cache.owners import Owner
from billing.errors import BillingError
from billing.prices.book import Terms
from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import TreeNode
from tiers.blocks.view import COMPUTING, LOADING
from tiers.tier import TierName

LABEL_TOKENS = 12  # of a row, shown as its first words
OUTLINE_TOKENS = 1 << 20  # of a row, searched for messages; more than any prompt has
LABEL_MESSAGES = 3
TIERS: Final = (TierName.DEVICE, TierName.HOST, TierName.DISK)
Decode = Callable[[Sequence[int]], str]
Strip = tuple[str, int, int, int]  # class of its colour, lane, first block, number of blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRow:
    """One node, together with the `num_folded` short ends that continue it.

    `level` counts from 0 below the scope. `saved` is None without a price. `label` is the node's
    first words if they may be shown, else the roles and sizes of its messages.
    """

    level: int
    node: TreeNode
    num_tokens: int
    nbytes: int
    num_in_use: int
    idle_s: float
    saved: int | None
    num_folded: int
    label: str

    @property
    def strips(self) -> list[Strip]:
        """Where the node's blocks are, with a lane per tier, because several may hold a block."""
        strips: list[Strip] = []
        for lane, tier in enumerate(TIERS):
            at = 0
            for held, blocks in groupby(tier in tiers for tiers in self.node.tiers):
                count = len(list(blocks))
                if held:
                    strips.append((tier, lane, at, count))
                at += count
        places = enumerate(self.node.places)
        return strips + [(at, 0, n, 1) for n, at in places if at in (COMPUTING, LOADING)]


SORTS: Final[Mapping[str, Callable[[PrefixRow], float]]] = {
    "tokens": lambda row: -row.num_tokens,
    "size": lambda row: -row.nbytes,
    "hits": lambda row: -row.node.hits,
    "used": lambda row: row.idle_s,
    "age": lambda row: -row.node.age_s,
    "saved": lambda row: -(row.saved or 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeRows:
    """A scope and its rows from the top down. Its totals are those of its rows."""

    root: str
    owner: Owner | None
    currency: str
    rows: list[PrefixRow]
    left_off: int

    @property
    def is_whole(self) -> bool:
        """Whether its rows are all that the scope holds."""
        return not self.left_off and not any(row.node.left_off for row in self.rows)

    def total(self, name: str) -> int:
        return sum(getattr(row, name) or 0 for row in self.rows)


def rows_of(
    parts: AdminParts, grown: Grown, *, sort: str = "", decode: Decode | None
) -> list[ScopeRows]:
    """Every scope with its rows. Those that continue one prefix are in the order of SORTS[sort]."""
    scopes = []
    for root in grown.tree.roots:
        key = root.last or PrefixKey(b"")
        owner = grown.owners.get(key)
        walk = _Walk(owner, parts, SORTS.get(sort), decode)
        rows = list(walk.below(root.children, 0, ""))
        if rows or root.left_off:
            has_price = walk.saved(TierName.DEVICE, 0) is not None
            scopes.append(
                ScopeRows(
                    root=key.hex(),
                    owner=owner,
                    currency=owner.currency if owner and has_price else "",
                    rows=rows,
                    left_off=root.left_off,
                )
            )
    return scopes


Messages = list[tuple[str, int, bool]]  # role, tokens, and whether it began in an earlier node


@dataclass(frozen=True, slots=True)
class _Walk:
    owner: Owner | None
    parts: AdminParts
    order: Callable[[PrefixRow], float] | None
    decode: Decode | None

    def below(self, nodes: Sequence[TreeNode], level: int, role: str) -> Iterator[PrefixRow]:
        """These nodes, each followed by its continuations. `role` is the preceding message's, which
        the first message of a node continues if it has no mark."""
        rows = []
        for node in nodes:
            outlined = self.parts.outline(array("i", node.tokens))
            messages = [(name or role, size, not name) for name, size in outlined]
            rows.append((self._row(node, level, messages), messages))
        if (order := self.order) is not None:
            rows.sort(key=lambda each: order(each[0]))
        for row, messages in rows:
            yield row
            longer = [each for each in row.node.children if not _is_end(each)]
            yield from self.below(longer, level + 1, messages[-1][0] if messages else "")

    def saved(self, tier: str, hit_tokens: int) -> int | None:
        """Estimated savings of these hits at the owner's price of today, in its currency; None
        without a price."""
        owner = self.owner
        if owner is None or not owner.currency:
            return None
        terms = Terms(tenant="" if owner.is_group else owner.name)
        book = self.parts.books.accounts.book
        try:
            rates = book.at(owner.model, time.time_ns(), owner.currency, terms).rates
        except BillingError:
            return None
        return hit_tokens * (rates.miss - getattr(rates, f"hit_{tier}", rates.hit_device))

    def _row(self, node: TreeNode, level: int, messages: Messages) -> PrefixRow:
        ends = [each for each in node.children if _is_end(each)]
        nodes = [node, *ends]
        block_bytes = self.parts.explorer.block_bytes
        saved = [self.saved(each.places[0], each.hit_tokens) for each in nodes]
        return PrefixRow(
            level=level,
            node=node,
            num_tokens=sum(each.num_tokens for each in nodes),
            nbytes=sum(each.num_blocks for each in nodes) * block_bytes,
            num_in_use=sum(each.num_in_use for each in nodes),
            idle_s=min(each.idle_s for each in nodes),
            saved=None if None in saved else sum(units or 0 for units in saved),
            num_folded=len(ends),
            label=self._label(node, messages),
        )

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
