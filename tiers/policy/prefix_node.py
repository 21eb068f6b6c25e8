"""A node of the prefix tree that `adaptive` keeps: a run of blocks with one history."""

from collections.abc import Sequence
from typing import Generic

from tiers.policy.policy import K
from tiers.policy.reuse_model import NUM_AGES, Rows, WaitOutcome


class PrefixRun(Generic[K]):
    """`blocks` holds the resident blocks, head first: a leading part of the run of `length`.

    A wait is the time from one use to the next. `serial` numbers the waits. It is -1 once the node
    is forgotten.
    """

    __slots__ = (
        "age", "blocks", "born_s", "bucket", "end", "head", "last_s", "learned", "length", "levels",
        "num_children", "parent", "rows", "serial", "turn", "uses",
    )  # fmt: skip

    def __init__(self, head: K, length: int, end: int, now_s: float) -> None:
        self.blocks: list[K] = []
        self.head = head
        self.length = length  # including evicted blocks
        self.end = end  # depth of the block after the run
        self.parent: PrefixRun[K] | None = None
        self.num_children = 0  # nodes below with resident blocks
        self.born_s = now_s
        self.last_s = now_s
        self.uses = 0
        self.turn = 0
        self.serial = 0
        self.rows: Rows = ()  # features at the start of the wait
        self.levels = bytes(NUM_AGES)  # worth by age
        self.age = 0  # number of the interval that the wait has reached
        self.learned = 0  # intervals of this wait that the model has learned from
        self.bucket = -1  # -1: not a candidate

    @property
    def num_missing(self) -> int:
        return self.length - len(self.blocks)

    def count_run(self, keys: Sequence[K], start: int) -> int:
        """How many of `keys` from `start` on are blocks of this node, in its order; at least 1."""
        first = 0 if self.blocks[0] == keys[start] else self.blocks.index(keys[start])
        size = 1
        longest = min(len(self.blocks) - first, len(keys) - start)
        while size < longest and self.blocks[first + size] == keys[start + size]:
            size += 1
        return size

    def split(self, size: int) -> "PrefixRun[K]":
        """Move the leading `size` blocks to a new node with the same history. Returns the new
        node."""
        upper: PrefixRun[K] = PrefixRun(self.head, size, self.end - self.length + size, self.born_s)
        upper.blocks, self.blocks = self.blocks[:size], self.blocks[size:]
        upper.last_s, upper.uses, upper.turn = self.last_s, self.uses, self.turn
        upper.rows, upper.learned = self.rows, self.learned
        upper.parent, self.parent = self.parent, upper
        upper.num_children = 1
        self.head = self.blocks[0]
        self.length -= size
        return upper

    def begin_wait(self, now_s: float, levels: bytes) -> None:
        self.last_s = now_s
        self.levels = levels
        self.age = self.learned = 0
        self.serial += 1

    def outcome(self, end: int, *, reused: bool) -> WaitOutcome:
        """The part of this wait, up to interval `end`, that the model has not learned from yet."""
        first, self.learned = self.learned, end
        return WaitOutcome(self.rows, first, end, reused, self.length**0.5)
