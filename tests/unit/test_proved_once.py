"""A block that is served from disk is looked into once: its header proved, its record read."""

import time
from collections import Counter

from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, TieredCache
from tiers.disk import reader
from tiers.disk.open import open_disk
from tiers.disk.shard import Shard
from tiers.tier import TierName
from tiers.transfer.ticket import Progress, Ticket

SIZE = 8
LAYOUT = BlockLayout.uniform(
    num_layers=2, block_size=SIZE, num_kv_heads=2, head_dim=8, dtype="float16"
)
NUM_BLOCKS = 10


def ready(cache: TieredCache, chain: Chain) -> Ticket:
    """The ticket, once all that it gets is on the device."""
    ticket = cache.open(chain)
    give_up = time.monotonic() + 120
    while cache.advance(ticket) is not Progress.READY:
        assert time.monotonic() < give_up
        cache.step()
        time.sleep(0.001)
    return ticket


def serve(cache: TieredCache, chain: Chain) -> list[TierName]:
    """Compute what no tier has; returns where the rest came from."""
    ticket = ready(cache, chain)
    sources = list(ticket.sources)
    blocks = [*ticket.blocks, *cache.tables.plan(chain, len(sources))]
    for number in range(len(sources), len(blocks)):
        cache.tables.provide(blocks[number])
        blocks[number] = cache.tables.commit(chain, number, blocks[number])
    cache.tables.release(chain, blocks, chain.num_tokens)
    return sources


def test_each_block_of_a_disk_hit_is_proved_and_read_once(tmp_path, monkeypatch):
    def opened() -> TieredCache:
        settings = CacheSettings(device_bytes=40 * LAYOUT.nbytes, host_bytes=40 * LAYOUT.nbytes)
        cache = TieredCache(LAYOUT, settings, disk=open_disk(tmp_path, LAYOUT, 64 << 20))
        cache.start()
        return cache

    def chain() -> Chain:
        root = CacheScope(tenant=b"once").root()
        return Chain(root, range(NUM_BLOCKS * SIZE), SIZE)

    first = opened()
    assert serve(first, chain()) == []
    assert first.close() == 0

    counts: Counter[str] = Counter()
    prove, read = reader.is_block, Shard.read
    monkeypatch.setattr(reader, "is_block", lambda *args: counts.update(["proved"]) or prove(*args))
    monkeypatch.setattr(Shard, "read", lambda *args: counts.update(["read"]) or read(*args))
    second = opened()
    assert serve(second, chain()) == [TierName.DISK] * NUM_BLOCKS
    assert counts == {"proved": NUM_BLOCKS, "read": NUM_BLOCKS}
    assert second.close() == 0
