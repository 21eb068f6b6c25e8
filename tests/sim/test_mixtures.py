"""Lives that mix what the other simulations draw one by one, over a disk that outlives them.

A life has one to three eras, each an engine of other sizes and settings over the same disk. In each
may come at once: windows, prefixes computed from both ends, copies that arrive late, copies that
are refused, quotas, pins, purges, evictions, preemptions, blocks that the disk loses, and a clock
that jumps. `python -m tests.sim.test_mixtures FIRST LAST` runs more seeds and tells which fail.
"""

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.sim import world as worlds
from tests.sim.life import TENANTS, Life, root_of
from tests.sim.world import World
from tests.support.memory_tier import MemoryTier
from tiers.errors import CopyFailed
from tiers.memory.device import DevicePool
from tiers.policy.admission import WritePolicy


def refuse(pool: DevicePool, chance: random.Random, rate: float) -> None:
    """Let a part of the pool's copies fail as they are begun."""

    def copied(own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if chance.random() < rate:
            raise CopyFailed("refused")
        return own(*given, **named)

    for name in ("copy_in", "copy_out", "copy_rows", "move"):
        setattr(pool, name, partial(copied, getattr(pool, name)))


class Mixture:
    """A seeded life."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = chance = random.Random(seed * 7927 + 5)
        self.window = chance.choice((None, 2, 6, 9, 13))
        self.windowed = chance.choice((1, 2, 3)) if self.window else 1
        shares = {root_of(tenant): chance.choice((0.05, 0.1, 0.3)) for tenant in TENANTS}
        self.quotas = shares if chance.random() < 0.3 else None
        self.disk_blocks = chance.choice((6, 10, 60, 300))
        self.tier: MemoryTier | None = None
        self.trunks: dict[bytes, list[list[int]]] | None = None
        self.now_s = 1_000_000.0

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worlds, "MemoryTier", self._disk)
        for era in range(self.chance.choice((1, 2, 3))):
            self._era(self._world(era))

    def _disk(self, *sizes: Any, **settings: Any) -> MemoryTier:
        """That of the eras before, if there were any."""
        if self.tier is None:
            self.tier = MemoryTier(*sizes, **settings)
        self.tier.fault_rate = settings["fault_rate"]
        return self.tier

    def _world(self, era: int) -> World:
        chance = self.chance
        world = World(
            device_blocks=chance.choice((14, 16, 24, 60)),
            host_blocks=chance.choice((4, 16, 40)),
            disk_blocks=self.disk_blocks,
            fault_rate=chance.choice((0.0, 0.0, 0.1, 0.4)),
            seed=self.seed * 10 + era,
            share_tails=chance.random() < 0.7,
            write_policy=chance.choice(list(WritePolicy)),
            max_running=chance.choice((1, 2, 6, 12)),
            step_tokens=chance.choice((4, 8, 16, 40)),
            host_moves=not self.window and chance.random() < 0.3,
            quotas=self.quotas,
            late_copies=chance.random() < 0.6,
            window=self.window,
            windowed=self.windowed,
            window_loss=chance.choice((0.0, 0.3, 0.9)) if self.window else 0.0,
        )
        world.now_s = self.now_s
        if chance.random() < 0.4:
            world.runner.copies_fail = True
            refuse(world.cache.pool, chance, chance.choice((0.02, 0.1, 0.3)))
        return world

    def _era(self, world: World) -> None:
        chance = self.chance
        life = Life(world, chance, arrivals=chance.choice((0.01, 0.1, 0.4)))
        self.trunks = life.trunks = self.trunks or life.trunks

        def sink() -> None:
            residency, below = world.cache.residency, chance.random() < 0.7
            for block in [*world.cache.index]:
                if block.slot is not None and not block.ref_count:
                    residency.evict_device(block)
                idle = not (block.ref_count or block.busy or block.pinned)
                if below and block.frame is not None and block.held_below and idle:
                    residency.evict_host(block)

        def preempt() -> None:
            scheduler = world.engine._scheduler
            if scheduler.running:
                scheduler._preempt(chance.choice(scheduler.running))

        def lose() -> None:
            world.disk_loses = True
            keys = list(world.tier._blocks)
            world.tier.discard(chance.sample(keys, min(len(keys), chance.randrange(1, 6))))

        def jump() -> None:
            world.now_s += chance.choice((-3600, 3600, -5, 60))

        acts = [life.pin, life.unpin, life.evict, life.trouble_disk, life.break_step]
        acts += [sink, sink, sink, preempt, lose, jump]
        if chance.random() < 0.5:
            acts.append(life.purge)
        life.run(chance.choice((20, 60)), acts)
        world.runner.copies_fail |= bool(life.purges)  # what was purged is computed again
        world.check()
        world.check_idle()
        world.now_s += 100_000  # all pins have ended, wherever the clock jumped
        world.check_still()
        self.now_s = world.now_s


@pytest.mark.parametrize("seed", range(16))
def test_whatever_comes_together_is_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Mixture(seed).run(monkeypatch)


def main() -> None:
    first, last = map(int, sys.argv[1:])
    for seed in range(first, last):
        with pytest.MonkeyPatch.context() as monkeypatch:
            try:
                Mixture(seed).run(monkeypatch)
            except Exception as error:  # noqa: BLE001 - told, and the next one is tried
                print(f"seed {seed}: {error!r}", flush=True)


if __name__ == "__main__":
    main()
