"""A block that is served from disk is looked into once: its header proved, its record read."""

from collections import Counter

from tests.support.caches import cache_of
from tests.support.served import LAYOUT, ROOT, TOKENS, serve
from tiers.blocks.chain import Chain
from tiers.disk import reader
from tiers.disk.open import open_disk
from tiers.disk.shard import Shard
from tiers.tier import TierName

NUM_BLOCKS = 10


def test_each_block_of_a_disk_hit_is_proved_and_read_once(tmp_path, monkeypatch):
    def served() -> dict[TierName, int]:
        """Of a server of its own, which flushes its blocks at its end."""
        cache = cache_of(LAYOUT, 40, 40, disk=open_disk(tmp_path, LAYOUT, 64 << 20))
        cache.start()
        hits = serve(cache, Chain(ROOT, range(NUM_BLOCKS * TOKENS), TOKENS))
        assert cache.close() == 0
        return hits

    assert served() == {}
    counts: Counter[str] = Counter()
    prove, read = reader.is_block, Shard.read
    monkeypatch.setattr(reader, "is_block", lambda *args: counts.update(["proved"]) or prove(*args))
    monkeypatch.setattr(Shard, "read", lambda *args: counts.update(["read"]) or read(*args))
    assert served() == {TierName.DISK: NUM_BLOCKS * TOKENS}
    assert counts == {"proved": NUM_BLOCKS, "read": NUM_BLOCKS}
