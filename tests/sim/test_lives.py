"""Any interleaving of requests gives each the tokens of a cold, lone run, and leaks nothing.

A life is one or more eras, each an engine of other sizes and settings over the same disk. A kind of
life says what may come in it; what it does not say is drawn from everything that there is. What an
operator was promised holds too: a pinned block is never lost, and after a purge nothing is found.
`python -m tests.sim.test_lives KIND FIRST LAST` lives more seeds and tells which fail.
"""

import random
import sys
from collections import Counter
from typing import Any

import pytest

from tests.sim.life import TENANTS, Life, more_seeds, root_of
from tests.sim.watched import Refusing
from tests.sim.world import World
from tests.support.memory_tier import MemoryTier
from tiers.policy.admission import WritePolicy
from tiers.tier import TierName

OPERATOR = ("pin", "unpin", "evict", "trouble_disk", "break_step")
EVERYTHING: dict[str, tuple[Any, ...]] = {
    "eras": (1, 2, 3),
    "requests": (20, 60),
    "arrivals": (0.01, 0.1, 0.4),
    "acts": (
        (*OPERATOR, *["evict_idle"] * 3, "preempt", "lose", "jump"),
        (*OPERATOR, *["evict_idle"] * 3, "preempt", "lose", "jump", "purge"),
    ),
    "device_blocks": (14, 16, 24, 60),
    "host_blocks": (4, 16, 40),
    "disk_blocks": (6, 10, 60, 300),
    "fault_rate": (0.0, 0.0, 0.1, 0.4),
    "write_policy": tuple(WritePolicy),
    "share_tails": (True, True, False),
    "max_running": (1, 2, 6, 12),
    "step_tokens": (4, 8, 16, 40),
    "late_copies": (True, True, False),
    "host_moves": (True, False, False),
    "window": (None, 2, 6, 9, 13),
    "windowed": (1, 2, 3),
    "window_loss": (0.0, 0.3, 0.9),
    "quotas": (True, False, False),
    "refused": (0.0, 0.0, 0.02, 0.1, 0.3),
}
USUAL: dict[str, tuple[Any, ...]] = {
    "eras": (1,),
    "arrivals": (0.4,),
    "device_blocks": (14, 24, 60),
    "max_running": (6,),
    "step_tokens": (16,),
    "late_copies": (True, False, False),
    "host_moves": (False,),
    "window": (None,),
    "quotas": (False,),
    "refused": (0.0,),
}
KINDS: dict[str, tuple[int, dict[str, tuple[Any, ...]]]] = {  # the number of lives, what may come
    "anything": (16, {}),
    "requests": (
        18,
        {
            **USUAL,
            "requests": (60,),
            "host_blocks": (0, 16, 40),
            "acts": ((), ("break_step", "trouble_disk")),
        },
    ),
    "windows": (  # of less than a block, and of several; below memory some of them are gone
        9,
        {
            **USUAL,
            "requests": (120,),
            "host_blocks": (16, 40),
            "window": (2, 6, 9),
            "acts": ((*OPERATOR, *["evict_idle"] * 3),),
        },
    ),
    "operators": (
        6,
        {
            **USUAL,
            "requests": (60,),
            "disk_blocks": (40, 300),
            "host_moves": (True, False),
            "quotas": (True, True, False),
            "acts": ((*OPERATOR, "pin", "pin", "purge"),),
        },
    ),
    "evictions": (
        8,
        {
            **USUAL,
            "requests": (100,),
            "late_copies": (True, True, False),
            "window": (None, None, 6),
            "acts": (
                ("pin", "unpin", "purge", "trouble_disk", *["evict"] * 4, *["evict_idle"] * 4),
            ),
        },
    ),
    "refused copies": (
        12,
        {
            **USUAL,
            "requests": (100,),
            "device_blocks": (14, 24),
            "window": (None, 2, 6),
            "refused": (0.5, 0.2, 0.05),
            "acts": (OPERATOR,),
        },
    ),
}


class Mixture:
    """A seeded life of a kind."""

    def __init__(self, kind: str, seed: int) -> None:
        self.may = EVERYTHING | KINDS[kind][1]
        self.seed = seed
        self.chance = random.Random(f"{kind} {seed}")
        self.tier: MemoryTier | None = None
        self.trunks: dict[bytes, list[list[int]]] | None = None
        self.now_s = 1_000_000.0
        self.window = self.draw("window")
        self.windowed = self.draw("windowed") if self.window else 1
        self.disk_blocks = self.draw("disk_blocks")
        shares = {root_of(tenant): self.chance.choice((0.05, 0.1, 0.3)) for tenant in TENANTS}
        self.quotas = shares if self.draw("quotas") else None
        self.seen: Counter[str] = Counter()

    def draw(self, name: str) -> Any:
        return self.chance.choice(self.may[name])

    def run(self) -> Counter[str]:
        """Live it; gives what was seen of what it is to prove."""
        for era in range(self.draw("eras")):
            self._era(self._world(era))
        return self.seen

    def _world(self, era: int) -> World:
        drawn = ("device_blocks", "host_blocks", "fault_rate", "share_tails", "write_policy")
        drawn += ("max_running", "step_tokens", "late_copies")
        world = World(
            **{name: self.draw(name) for name in drawn},
            seed=self.seed * 10 + era,
            disk_blocks=self.disk_blocks,
            host_moves=not self.window and self.draw("host_moves"),
            quotas=self.quotas,
            window=self.window,
            windowed=self.windowed,
            window_loss=self.draw("window_loss") if self.window else 0.0,
            tier=self.tier,
        )
        self.tier, world.now_s = world.tier, self.now_s
        return world

    def _era(self, world: World) -> None:
        chance, refused = self.chance, None
        if rate := self.draw("refused"):
            world.runner.copies_fail = True
            numbers = {number for number in range(20_000) if chance.random() < rate}
            refused = Refusing(world.cache.pool, numbers)
        life = Life(world, chance, arrivals=self.draw("arrivals"))
        self.trunks = life.trunks = self.trunks or life.trunks
        life.run(self.draw("requests"), [getattr(life, act) for act in self.draw("acts")])
        world.runner.copies_fail |= bool(life.purges)  # what was purged is computed again
        world.check()
        assert all(purge.result(0).num_left == 0 for purge in life.purges)
        world.now_s += 100_000  # all pins have ended, wherever the clock jumped
        world.check_still()
        if not world.disk_loses:
            check_quotas(world)
        self.now_s = world.now_s
        self.seen["checked"] += world.runner.num_checked
        self.seen["refused"] += refused.num_refused if refused else 0
        risen = world.cache.stats().transfers[TierName.HOST, TierName.DEVICE]
        spared = risen.num_blocks * world.cache.layout.nbytes - risen.nbytes
        assert spared >= 0
        self.seen["spared"] += spared


def check_quotas(world: World) -> None:
    """What the groups have of each tier is what the tier holds."""
    stats = world.cache.stats()
    for tier in (stats.device, stats.host, stats.disk):
        uses = [use.used_bytes for use in stats.groups if use.tier is tier.name]
        held = tier.num_blocks * world.cache.layout.nbytes
        assert not uses or sum(uses) == held, tier.name


@pytest.mark.parametrize(
    ("kind", "seed"), [(kind, seed) for kind, (count, _) in KINDS.items() for seed in range(count)]
)
def test_any_interleaving_is_exact(kind, seed):
    life = Mixture(kind, seed)
    seen = life.run()
    if kind == "refused copies":
        assert seen["refused"] > 3
    elif kind != "anything":
        assert seen["checked"] > 30
    if kind == "windows" and life.window == 2:
        assert seen["spared"] > 0, "windows that nobody needs were moved"


if __name__ == "__main__":
    more_seeds(lambda seed: Mixture(sys.argv[1], seed).run())
