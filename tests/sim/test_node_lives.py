"""A node's pools under clients that come and go, over disks that fail, while operators act.

Two layouts share one capacity. Clients reserve, write, lease, fetch, leave halfway and leave with
all that they hold; loads are told of late; operators pin, evict and purge. What is leased holds its
own bytes for as long as it is leased, and nothing of a purged scope is served until it is opened.
`python -m tests.sim.test_node_lives FIRST LAST` lives more seeds.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.sim.life import more_seeds
from tests.support.memory_tier import MemoryTier, SteppedMover
from tiers.blocks.keys import BlockId, CacheScope, PrefixKey, block_ids, token_bytes
from tiers.memory.block import BlockState
from tiers.node import pool as pools
from tiers.node.arena import SharedArena, create, frame_stride
from tiers.node.capacity import Capacity
from tiers.node.messages import engine_layout
from tiers.node.operations import Operated, PoolOperations
from tiers.node.pool import Lease, Pool
from tiers.policy.quota import Quotas, QuotaShares

TOKENS = 4
ROOTS = [CacheScope(weights=b"w", tenant=tenant).root() for tenant in (b"a", b"b")]
LAYOUTS = [engine_layout(2, nbytes, TOKENS, "float32") for nbytes in (256, 512)]
FRAMES = 24  # of the smaller layout


def prompt(root: PrefixKey, number: int, num_blocks: int) -> list[BlockId]:
    """Prompts part after the first, the second or a later block."""
    tokens = [9] * TOKENS + [number % 2] * TOKENS + [number] * (num_blocks * TOKENS)
    return block_ids(root, token_bytes(tokens[: num_blocks * TOKENS]), TOKENS)


@dataclass(eq=False)
class Client:
    """One connection to one pool."""

    number: int
    pool: "Shared"
    waits: tuple[list[BlockId], Lease] | None = None
    leased: list[tuple[list[BlockId], list[int]]] = field(default_factory=list)
    filling: list[tuple[list[BlockId], list[tuple[int, int]]]] = field(default_factory=list)
    purging: Operated | None = None


@dataclass(eq=False)
class Shared:
    """One layout's pool, its disk and its operations."""

    pool: Pool
    tier: MemoryTier
    mover: SteppedMover
    operations: PoolOperations


class Node:
    """A seeded life, in simulated time."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.chance = chance = random.Random(seed * 5623 + 1)
        self.now_s = 1000.0
        strides = [frame_stride(layout) for layout in LAYOUTS]
        shares = QuotaShares(1_000_000, dict.fromkeys(ROOTS, 300_000))
        self.quotas = shares if chance.random() < 0.4 else None
        nbytes = FRAMES * strides[0]
        quotas = Quotas(shares, nbytes) if self.quotas is not None else None
        self.capacity = Capacity(nbytes, quotas)
        self.pools = [self._pool(seed, layout) for layout in LAYOUTS]
        self.clients: list[Client] = []
        self.said: Counter[str] = Counter()
        self.touching: list[tuple[SharedArena, int]] = []
        self.num_clients = 0

    def _pool(self, seed: int, layout: Any) -> Shared:
        chance = self.chance
        tier = MemoryTier(
            chance.choice((6, 20, 200)),
            block_bytes=layout.nbytes,
            fault_rate=chance.choice((0.0, 0.0, 0.2)),
            seed=seed,
        )
        mover = SteppedMover(tier, seed=seed, max_jobs=chance.choice((2, 8)), late_rate=0.3)
        memory = create(layout, self.capacity.capacity_bytes // frame_stride(layout))
        memory.piece_frames = 2
        pool = Pool(memory, self.capacity, mover)
        give_back = memory.give_back

        def give_back_unlocked(number: int) -> None:
            assert not pool.arena.is_locked(number), "a GPU still has this page"
            give_back(number)

        memory.give_back = give_back_unlocked
        operations = PoolOperations(pool, tier, None, 20)
        operations.keeper.clock = lambda: self.now_s
        return Shared(pool, tier, mover, operations)

    # What clients do.

    def come(self) -> None:
        if len(self.clients) < 5:
            self.num_clients += 1
            self.clients.append(Client(self.num_clients, self.chance.choice(self.pools)))

    def leave(self) -> None:
        """As the connection's end: what it waits for, has leased, is writing and has closed."""
        if not self.clients or self.chance.random() < 0.7:
            return
        client = self.clients.pop(self.chance.randrange(len(self.clients)))
        pool = client.pool.pool
        if client.waits is not None:
            pool.give_up(client.waits[1])
        for _, frames in client.leased:
            pool.release(frames)
        for _, pairs in client.filling:
            pool.abandon([frame for _, frame in pairs])
        client.pool.operations.leave(client.number)

    def reserve(self) -> None:
        for client in self._some():
            ids = self._ids()
            pairs = client.pool.pool.reserve(ids)
            assert not pairs or ids[0].scope not in client.pool.pool.closed
            if pairs:
                client.filling.append((ids, pairs))

    def commit(self) -> None:
        for client in self._some():
            if client.filling:
                ids, pairs = client.filling.pop(self.chance.randrange(len(client.filling)))
                pool = client.pool.pool
                for position, frame in pairs:
                    pool.memory.rows[frame, :16] = _bytes(ids[position].key)
                if self.chance.random() < 0.9:
                    pool.commit([frame for _, frame in pairs])
                else:
                    pool.abandon([frame for _, frame in pairs])

    def lease(self) -> None:
        for client in self._some():
            if client.waits is None:
                ids = self._ids()
                client.waits = ids, client.pool.pool.lease(ids)

    def fetch(self) -> None:
        for client in self._some():
            client.pool.pool.fetch(self._ids())

    def probe(self) -> None:
        for client in self._some():
            client.pool.pool.probe(self._ids())

    def settle(self) -> None:
        for client in self.clients:
            if client.waits is not None and client.waits[1].is_ready:
                (ids, lease), client.waits = client.waits, None
                frames = client.pool.pool.settle(lease)
                self.said["leased"] += len(frames)
                if frames:
                    client.leased.append((ids, frames))

    def release(self) -> None:
        for client in self._some():
            if client.leased:
                _, frames = client.leased.pop(self.chance.randrange(len(client.leased)))
                client.pool.pool.release(frames)

    # What operators do.

    def pin(self) -> None:
        for client in self._some():
            ids = self._ids()
            about = {"name": self.chance.choice("abc"), "scope": ids[0].scope.hex(), "why": "w"}
            about |= {"keys": [each.key.hex() for each in ids], "owner": ""}
            self._operate(client, do="pin", for_s=self.chance.randrange(60), **about)

    def unpin(self) -> None:
        for client in self._some():
            self._operate(client, do="unpin", name=self.chance.choice("abc"))

    def evict(self) -> None:
        for client in self._some():
            self._operate(client, do="evict", keys=[each.key.hex() for each in self._ids()])

    def purge(self) -> None:
        for client in self._some():
            if client.purging is None:
                root = self.chance.choice(ROOTS)
                client.purging = self._operate(client, do="purge", roots=[root.hex()])

    def open(self) -> None:
        for client in self._some():
            if client.purging is not None and client.purging.is_ready:
                answer = client.purging.answer()
                assert 0 == answer["num_left"], answer
                self._operate(client, do="open")
                client.purging = None
                self.said["purged"] += 1

    def _operate(self, client: Client, **asked: Any) -> Operated:
        return client.pool.operations.operate(client.number, asked)

    def pages(self) -> None:
        """A GPU's pages are locked, and spare frames touched."""
        arena = self.chance.choice(self.pools).pool.arena
        piece = self.chance.randrange(2)
        if arena._locks[piece]:
            arena.unlock(piece)
        else:
            del arena._locks[piece]
            arena.lock(piece)
        if (number := arena.untouched()) is not None:
            self.touching.append((arena, number))
        if self.touching and self.chance.random() < 0.5:  # its frame may be given up by now
            arena, number = self.touching.pop(0)
            arena.touched(number)

    def trouble(self) -> None:
        self.chance.choice(self.pools).tier.fault_rate = self.chance.choice((0.0, 0.0, 0.3, 1.0))

    def _some(self) -> list[Client]:
        """One client that does not wait for a purge, or none: a connection asks one thing at a
        time."""
        free = [each for each in self.clients if each.waits is None]
        return self.chance.sample(free, min(1, len(free)))

    def _ids(self) -> list[BlockId]:
        root, number = self.chance.choice(ROOTS), self.chance.randrange(6)
        return prompt(root, number, self.chance.randrange(1, 5))

    # Time.

    def step(self) -> None:
        self.now_s += self.chance.random()
        for each in self.pools:
            each.mover.run(self.chance.randrange(4))
            each.pool.work()
            each.operations.step()
        self.settle()

    def check(self) -> None:
        held: Counter[tuple[int, int]] = Counter()
        for client in self.clients:
            for ids, frames in client.leased:
                rows = client.pool.pool.memory.rows
                for block, frame in zip(ids, frames, strict=False):
                    assert block.key == bytes(rows[frame, :16].tolist()), "not its own bytes"
                    held[self.pools.index(client.pool), frame] += 1
        for number, each in enumerate(self.pools):
            each.pool.check()
            for block in each.pool.residency.index:
                if block.state is BlockState.READY:
                    most = block.ref_count - held[number, block.frame.number]
                    assert most >= 0, f"{block} is leased more often than used"
            for closed in each.pool.closed:
                scopes = {block.scope for block in each.pool.residency.index}
                assert closed not in scopes, "a scope that is closed has blocks"

    def end(self) -> None:
        while self.clients:
            self.leave()
        for _ in range(50):
            self.now_s += 100.0
            self.step()
        for each in self.pools:
            pool, index = each.pool, each.pool.residency.index
            assert all(block.ref_count == block.busy == 0 for block in index)
            below = [block.key for block in index if block.held_below and block.key is not None]
            assert all(each.tier.held(below)), "a block is taken to be below that is not"
            assert not pool.closed and not each.mover.num_jobs
        self.check()


def _bytes(key: bytes) -> torch.Tensor:
    return torch.tensor(list(key), dtype=torch.uint8)


def lived(seed: int, num_acts: int = 600) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:
        return _live(Node(seed, patch), num_acts)


def _live(node: "Node", num_acts: int) -> Counter[str]:
    often = [node.reserve, node.commit, node.lease, node.release, node.fetch, node.probe]
    acts = [*often * 3, *[node.step] * 8, node.come, node.come, node.leave]
    acts += [node.pin, node.unpin, node.evict, node.purge, *[node.open] * 4]
    acts += [node.pages, node.trouble]
    for number in range(num_acts):
        node.chance.choice(acts)()
        if number % 4 == 0:
            node.check()
    node.end()
    for each in node.pools:
        each.pool.memory.close()
    return node.said


@pytest.mark.parametrize("first", [0, 10, 20, 530])
def test_whoever_comes_and_goes_gets_its_own_bytes(first):
    said = sum(map(lived, range(first, first + 10)), Counter[str]())
    assert said["leased"] > 100 and said["purged"] > 10, said


if __name__ == "__main__":
    more_seeds(lived)
