"""A prefix is published once everything that the shared tier takes of it is written."""

from tests.support.memory_tier import MemoryTier
from tests.unit.test_pins_kept import LAYOUT, Bench


class SharedTier(MemoryTier):
    """One from which other machines could load, if it took anything."""

    is_shared = True


def test_a_block_that_the_shared_tier_refused_is_not_waited_for():
    tier = SharedTier(60, block_bytes=LAYOUT.nbytes)
    bench = Bench(tier=tier)
    tier.fault_rate = 1.0
    prompt = bench.chain(0, 4)
    bench.serve(prompt)
    assert bench.operations.publish(prompt) is None, "they are to be written first"
    bench.settle()
    published = bench.operations.publish(prompt)
    assert published is not None and 0 == published.result(1)
