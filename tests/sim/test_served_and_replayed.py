"""What the real cache serves from three tiers, block by block, beside what the replay says."""

from array import array
from collections import Counter
from dataclasses import replace

import pytest

from tests.support.memory_tier import MemoryTier, SteppedMover
from tests.support.served import LAYOUT, ROOT, TOKENS, replay_trace, serve, whole
from tests.support.workloads import Load, agents, chat, documents, make_trace
from tiers.blocks.chain import Chain
from tiers.cache import CacheSettings, TieredCache
from tiers.telemetry.events import CacheEvent
from tiers.tier import TierName

POINTS = 0.5  # percent of the prompt tokens
LOADS: dict[str, list[Load]] = {
    "chat and agents": [chat(0.5), agents(0.02)],
    "documents": [documents(1.0, number=200, shift_s=300.0)],
}


class LruTier(MemoryTier):
    """The disk's order: a load makes blocks the last to leave, the head after the tail."""

    def load(self, ids, into):
        loaded = super().load(ids, into)
        for block in reversed(ids[: loaded.num_blocks]):
            self._blocks.move_to_end(block.key)
        return loaded


class PromptCache(TieredCache):
    """A cache whose disk has done everything that it was given by the next step."""

    def step(self):
        self._mover.run(1_000)
        super().step()


@pytest.mark.parametrize("load", LOADS)
def test_the_tiers_serve_what_their_replay_says_and_lose_nothing(load):
    made = make_trace(load, LOADS[load], duration_s=450.0, seed=1)
    requests = [replace(whole(request), tenant=None) for request in made.requests]
    trace = replace(made, requests=requests, block_tokens=TOKENS)
    blocks = trace.working_set_blocks()
    longest = max(len(request.blocks) for request in requests)
    sizes = [max(longest, blocks // 50), blocks // 20, blocks // 2]
    served, lost = serve_from_memory(trace, sizes)
    replayed = replay_trace(trace, sizes).tiers
    for tier, name in zip(replayed, TierName, strict=False):
        points = 100 * (served[name] - tier.hit_tokens) / trace.input_tokens
        assert abs(points) <= POINTS, f"{name}: {served[name]} of {tier.hit_tokens} tokens"
    assert served[TierName.DISK] > 0
    assert lost == 0


def serve_from_memory(trace, sizes):
    """Hit tokens by tier, and blocks lost, over a disk in memory."""
    tier = LruTier(sizes[2], block_bytes=LAYOUT.nbytes)
    cache = PromptCache(
        LAYOUT,
        CacheSettings(
            device_bytes=sizes[0] * LAYOUT.nbytes,
            host_bytes=sizes[1] * LAYOUT.nbytes,
            weigh_loads=False,
        ),
        disk=tier,
        mover=SteppedMover(tier, fail_rate=0.0, max_jobs=64),
    )
    served = Counter()
    numbers = {}
    for request in trace.requests:
        tokens = array("i")
        for block in request.blocks:
            first = numbers.setdefault(block, len(numbers)) * TOKENS
            tokens.extend(range(first, first + TOKENS))
        served.update(serve(cache, Chain(ROOT, tokens, TOKENS)))
        cache.step()
        while cache.is_moving:
            cache.step()
    cache.residency.check()
    events = cache.stats().events
    return served, sum(n for (_, event), n in events.items() if event is CacheEvent.LOST)
