"""The linked orders of the device and the host leave in the order of the plain LRU."""

import random

import pytest

from tests.support.plain_lru import Lru
from tiers.memory.block import NO_BLOCK, Block
from tiers.memory.lru import DeviceLru, HostLru
from tiers.policy.policy import Use

USE = Use(1.0)


@pytest.mark.parametrize("order", [DeviceLru, HostLru])
@pytest.mark.parametrize("seed", range(5))
def test_any_calls_leave_the_order_of_the_plain_lru(order, seed):
    chance = random.Random(seed)
    linked, plain = order(), Lru[Block]()
    idle: list[Block] = []
    held: list[Block] = []
    for _ in range(3000):
        what = chance.choice(("insert", "insert", "hold", "release", "touch", "remove", "victim"))
        if what == "insert":
            idle.append(Block(0.0))
            linked.insert(idle[-1], USE)
            plain.insert(idle[-1], USE)
        elif what == "release" and held:
            block = held.pop(chance.randrange(len(held)))
            linked.release(block, USE)
            plain.release(block, USE)
            idle.append(block)
        elif what == "remove" and held and chance.random() < 0.5:
            block = held.pop()
            linked.remove(block)
            plain.remove(block)
        elif what in ("hold", "touch", "remove") and idle:
            block = chance.choice(idle)
            args = (block, USE) if what == "touch" else (block,)
            getattr(linked, what)(*args)
            getattr(plain, what)(*args)
            if what != "touch":
                idle.remove(block)
            if what == "hold":
                held.append(block)
        elif what == "victim":
            victim = linked.victim()
            assert victim is plain.victim()
            if victim is not None:
                idle.remove(victim)
        assert linked.coldest(5) == plain.coldest(5)
    assert linked.coldest(10_000) == plain.coldest(10_000)


def test_a_block_that_left_knows_no_neighbour():
    """Or blocks that are gone would hold each other, for the garbage collector to find."""
    order = DeviceLru()
    blocks = [Block(0.0) for _ in range(3)]
    for block in blocks:
        order.insert(block, USE)
    order.hold(blocks[1])
    assert order.victim() is blocks[0]
    order.remove(blocks[2])
    assert all(block.older is block.newer is NO_BLOCK for block in blocks)
    assert order.victim() is None
