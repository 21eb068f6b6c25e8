"""The engine's random lives once more, under pins, quotas, moves and purges.

What an operator was promised holds whatever the interleaving: a pinned block is never lost, a
tenant within its share loses nothing to another's scan, and after a purge nothing is found.
"""

import random

import pytest

from engine.request import FinishReason
from tests.sim.life import root_of
from tests.sim.test_lives import check_quotas
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tiers.blocks.chain import Chain
from tiers.tier import TierName


@pytest.mark.parametrize("host_moves", [False, True])
def test_a_tenant_within_its_share_loses_nothing_to_a_scan(host_moves):
    """Half of every tier is promised to one tenant, and another asks for ever new prompts."""
    sizes = {"device_blocks": 40, "host_blocks": 40, "disk_blocks": 120, "max_running": 2}
    world = World(**sizes, quotas={root_of(b"acme"): 0.5}, host_moves=host_moves)
    prompts = [[tenth * 5 + n % 5 for n in range(18)] for tenth in range(4)]
    for number, prompt in enumerate(prompts):
        world.ask(f"acme{number}", prompt, max_tokens=1, tenant=b"acme")
    keys = [key for p in prompts for key in Chain(root_of(b"acme"), p, BLOCK).keys]
    chance = random.Random(1)
    for number in range(200):
        scan = [chance.randrange(50) for _ in range(30)]
        world.ask(f"scan{number}", scan, max_tokens=1, tenant=b"scan")
        world.settle()
    blocks = [world.cache.index.get(key) for key in keys]
    assert all(block is not None and block.slot is not None for block in blocks)
    for number, prompt in enumerate(prompts):
        world.ask(f"again{number}", prompt, max_tokens=1, tenant=b"acme")
        assert world.counts(f"again{number}").hit_device == 17
    world.check()
    check_quotas(world)
    used = {(use.tier, use.group): use for use in world.cache.operations.quotas()}
    assert used[TierName.DEVICE, None].used_bytes > used[TierName.DEVICE, None].share_bytes * 0.9


def test_a_purged_tenants_running_request_finishes_and_is_not_kept():
    world = World(device_blocks=60, host_blocks=40, disk_blocks=200)
    prompt = list(range(30))
    world.ask("before", prompt, max_tokens=2, tenant=b"acme")
    world.ask("other", prompt, max_tokens=2, tenant=b"other")
    world.submit("running", [*prompt, 7], max_tokens=10, tenant=b"acme", n=2)
    world.submit("waiting", [*prompt, 8], max_tokens=10, tenant=b"acme")
    for _ in range(3):
        world.step()
    done = world.cache.operations.purge([root_of(b"acme")])
    world.ask("meanwhile", [*prompt, 9], max_tokens=2, tenant=b"acme")
    world.settle()
    purged = done.result(0)
    assert (purged.num_left, purged.roots) == (0, (root_of(b"acme"),))
    assert purged.removed[TierName.DEVICE].num_blocks >= 7
    assert purged.in_use >= 7
    keys = [*Chain(root_of(b"acme"), [*prompt, 7], BLOCK).keys]
    assert not any(world.stands(keys))
    assert world.tier.count([root_of(b"acme")]) == 0
    assert world.tier.count([root_of(b"other")]) + len(world.cache.index) > 0
    world.check()
    world.ask("after", prompt, max_tokens=2, tenant=b"acme")
    assert world.counts("after").hit == 0
    world.ask("again", prompt, max_tokens=2, tenant=b"acme")
    assert world.counts("again").hit == len(prompt) - 1


def test_a_prompt_that_is_scored_while_its_tenant_is_purged_is_kept_nowhere():
    """It reads no cached block, and may not leave any either."""
    world = World(device_blocks=60)
    world.ask("before", list(range(30)), max_tokens=1, tenant=b"acme")
    done = world.cache.operations.purge([root_of(b"acme")])
    world.submit("scored", list(range(30)), max_tokens=1, tenant=b"acme", prompt_logprobs=0)
    world.engine.turn()
    world.run()
    world.settle()
    assert 0 == done.result(0).num_left
    assert 0 == sum(block.scope == root_of(b"acme") for block in world.cache.index)
    world.check()


def test_a_purge_that_the_disk_refuses_says_so():
    world = World(device_blocks=40)

    def refuse(roots: object) -> None:
        raise OSError("the disk is gone")

    world.tier.purge = refuse
    done = world.cache.operations.purge([root_of(b"acme")])
    world.settle()
    with pytest.raises(OSError, match="the disk is gone"):
        done.result(0)
    world.ask("after", [1] * 9, max_tokens=1, tenant=b"acme")
    assert world.outputs["after"][-1].finish is FinishReason.LENGTH
