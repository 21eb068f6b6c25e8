"""What is billed as a hit: the rules of docs/billing.md on the real engine and the launch card."""

from billing.prices.cards import default_card
from billing.prices.rating import rate
from billing.usage import Usage
from tests.sim.world import World
from tiers.errors import MissReason

HIT, MISS, OUTPUT = 100_000, 1_000_000, 2_000_000


def billed(world: World, name: str) -> tuple[Usage, int]:
    """The usage that the last output of a request tells, and its price."""
    usage = Usage.from_counts(world.counts(name))
    return usage, rate(usage, default_card().at("any", 2 * 10**18)).amount


def test_waiting_for_anothers_computation_is_a_hit() -> None:
    """Eight ask for one prefix at once; one computes it, and the others are billed hits."""
    world = World(device_blocks=100)
    prefix = [number % 39 for number in range(96)]  # more than the card's least cached size
    for number in range(8):
        world.submit(f"r{number}", [*prefix, 40 + number, 3], max_tokens=1)
    world.run()
    usages = [billed(world, f"r{number}") for number in range(8)]
    misses = sorted(usage.miss for usage, _ in usages)
    assert world.runner.computed == sum(misses)
    assert [2] * 7 + [98] == misses
    assert {(96 * HIT + 2 * MISS + OUTPUT), 98 * MISS + OUTPUT} == {price for _, price in usages}


def test_what_is_computed_again_after_a_preemption_is_neither_a_hit_nor_billed_twice() -> None:
    world = World(device_blocks=14, host_blocks=16, max_running=6)
    for number in range(12):
        world.submit(f"r{number}", [number] * 20, max_tokens=10)
    world.run()
    assert world.engine.stats().num_preemptions > 0
    assert world.runner.computed > 12 * 20, "nothing was computed again"
    for number in range(12):
        usage, price = billed(world, f"r{number}")
        assert Usage(miss=20, output=10) == usage
        assert 20 * MISS + 10 * OUTPUT == price
        told = {(o.counts.hit_device, o.counts.miss) for o in world.outputs[f"r{number}"]}
        assert {(0, 20)} == told, "the counts changed after the first admission"


def test_a_client_leaving_while_preempted_is_billed_for_the_computed_prompt() -> None:
    """The prompt is computed again when it resumes. Until then it counts as first served."""
    world = World(device_blocks=14, host_blocks=0, step_tokens=8)
    world.submit("leaves", [*range(17)], max_tokens=10)
    while len(world.tokens("leaves")) < 2:
        world.step()
    scheduler = world.engine._scheduler
    (running,) = scheduler.running
    scheduler._preempt(running)
    for block in [*world.cache.index]:
        world.cache.residency.forget_everywhere(block)
    while not running.num_standing:
        world.step()
    assert 0 < running.num_standing < 17
    world.engine.abort("leaves")
    world.run()
    assert Usage(miss=17, output=2) == billed(world, "leaves")[0]
    world.check()


def test_a_block_that_failed_to_load_is_a_miss_with_its_reason() -> None:
    world = World(device_blocks=12, host_blocks=16, disk_blocks=500)
    prompt = [*range(20), 7]
    world.ask("cold", prompt, max_tokens=1)
    for number in range(7):
        world.ask(f"flood{number}", [40 + number] * 40)
        world.mover.run(10)
    world.tier.fault_rate = 1.0
    world.submit("again", prompt, max_tokens=1)
    world.run(max_turns=500)
    world.check()
    reasons = {reason for output in world.outputs["again"] for reason in output.miss_reasons}
    assert reasons & {MissReason.CHECKSUM, MissReason.IO_ERROR}
    usage, price = billed(world, "again")
    assert (0, 21) == (usage.hit_disk, usage.prompt)
    assert 21 * MISS + OUTPUT == price  # what the device still had is less than the least size
