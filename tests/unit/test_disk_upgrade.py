"""A folder of an earlier program is opened and hit, and may hold compressed and other records."""

import io
import sys
import tarfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from tests.support.faulty_storage import SCOPE, take, wipe
from tiers.blocks.frames import FrameArena
from tiers.blocks.keys import BlockId, block_ids, token_bytes
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.disk.directory import shard_of
from tiers.disk.format.codec import CodecId
from tiers.disk.inspection.export import export, import_blocks
from tiers.disk.inspection.maintenance import give_back
from tiers.disk.inspection.opening import open_shards
from tiers.disk.inspection.verify import verify_all
from tiers.disk.inspection.view import open_view
from tiers.disk.open import open_disk
from tiers.disk.rates import RateMeter
from tiers.disk.tier import DiskTier

# Written by this module before records could be left uncompressed for speed.
OLD_FOLDERS = Path(__file__).parent / "disks" / "written-2026-11.tar.xz"
SIZE, COUNT = 16, 3
FULL, SLIDING = LayerLayout(2, 16, 16), LayerLayout(2, 16, 16, window=40)
LAYOUTS = {
    "bfloat16": BlockLayout.uniform(2, SIZE, 2, 16, "bfloat16"),
    "windows": BlockLayout((SLIDING, FULL), SIZE, "float32"),
}
CAPACITY = 2 << 20
KINDS = ("kv", "noise", "later")  # the last is not in the old folders
PLANES = {"bfloat16": CodecId.PLANES16, "windows": CodecId.PLANES32}


def blocks(kind: str) -> list[BlockId]:
    first = 1000 * KINDS.index(kind)
    tokens = token_bytes(range(first, first + COUNT * SIZE))
    return block_ids(SCOPE.root(), tokens, SIZE)


def content(block: BlockId, kind: str, nbytes: int) -> bytes:
    """Noise, which no codec makes smaller. Else noise with few exponents."""
    digests = [xxhash.xxh3_128_digest(block.key, seed) for seed in range(-(-nbytes // 16))]
    data = bytearray(b"".join(digests)[:nbytes])
    if kind != "noise":
        for high in (1, 3):
            data[high::4] = bytes(byte & 3 | 60 for byte in data[high::4])
    return bytes(data)


def store(tier: DiskTier, kinds: Sequence[str] = KINDS[:2]) -> None:
    frames = take(FrameArena(tier.layout, COUNT), COUNT)
    for kind in kinds:
        for frame, block in zip(frames, blocks(kind), strict=True):
            frame.buffer[:] = content(block, kind, len(frame.buffer))
        assert not tier.store(blocks(kind), frames)


def hits(tier: DiskTier) -> int:
    """How many blocks are served; each is compared."""
    frames = take(FrameArena(tier.layout, COUNT), COUNT)
    total = 0
    for kind in KINDS:
        wipe(frames)
        loaded = tier.load(blocks(kind), frames).num_blocks
        for frame, block in zip(frames[:loaded], blocks(kind), strict=False):
            assert frame.buffer == content(block, kind, len(frame.buffer))
        total += loaded
    return total


def codecs(root: Path) -> dict[str, list[CodecId]]:
    """The codecs of the blocks on disk, by kind."""
    with open_view(root) as view:
        found = {info.key: CodecId(info.codec) for info in view.blocks()}
    return {
        kind: held
        for kind in KINDS
        if (held := [found[b.key] for b in blocks(kind) if b.key in found])
    }


def sound(root: Path) -> int:
    """How many blocks are on disk; each is verified."""
    with open_view(root) as view:
        verified = verify_all(view.shards)
    assert verified.sound, verified
    return verified.num_blocks


def opened(name: str, root: Path) -> DiskTier:
    return open_disk(root, LAYOUTS[name], CAPACITY, check_s=60)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(OLD_FOLDERS) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_an_earlier_program_wrote_is_sound_and_hit(name: str, old: Path) -> None:
    root = old / name
    written = {"kv": [PLANES[name]] * COUNT, "noise": [CodecId.RAW] * COUNT}
    assert written == codecs(root)
    assert 2 * COUNT == sound(root)
    with closing(opened(name, root)) as tier:
        assert 2 * COUNT == hits(tier)
        assert not tier.stats().faults


@pytest.mark.parametrize("name", LAYOUTS)
def test_uncompressed_records_stand_beside_old_ones_in_every_tool(
    name: str, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, copy = old / name, tmp_path / "copy"
    monkeypatch.setattr(RateMeter, "stores_raw", lambda _: True)
    with closing(opened(name, root)) as tier:
        store(tier, ["later"])
        assert 3 * COUNT == hits(tier)
    assert [CodecId.RAW] * COUNT == codecs(root)["later"]
    assert [PLANES[name]] * COUNT == codecs(root)["kv"]
    assert 3 * COUNT == sound(root)
    stream = io.BytesIO()
    with open_shards(root, readonly=True) as (_, shards):
        assert 3 * COUNT == export(shards, stream, lambda *_: True).num_blocks
    opened(name, copy).close()
    stream.seek(0)
    with open_shards(copy, readonly=False) as (_, shards):
        assert 3 * COUNT == import_blocks(shards, stream, shard_of).num_blocks
        give_back(shards)
    assert codecs(root) == codecs(copy)
    with closing(opened(name, copy)) as tier:
        assert 3 * COUNT == hits(tier)
        assert not tier.stats().faults


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_of_another_size_are_announced_once_and_not_served(
    name: str, old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, told = old / name, "last served in blocks of 64 tokens (unless cache.block_size was set)"
    longer = replace(LAYOUTS[name], block_size=2 * SIZE)
    for expected in ([told], []):
        caplog.clear()
        with closing(open_disk(root, longer, CAPACITY, check_s=60)) as tier:
            for kind in KINDS:
                run = b"".join(block.tokens for block in blocks(kind))
                ids = block_ids(SCOPE.root(), run[: longer.block_size * 4], longer.block_size)
                assert not tier.load(ids, take(FrameArena(longer, 1), 1)).num_blocks
        said = [entry.message for entry in caplog.records if "of another size" in entry.message]
        assert len(expected) == len(said)
        assert all(text in line for text, line in zip(expected, said, strict=True))
    with closing(opened(name, root)) as tier:
        assert 2 * COUNT == hits(tier)
    assert f"blocks of {2 * SIZE} tokens, now of {SIZE}" in caplog.text


if __name__ == "__main__":
    [out] = sys.argv[1:]
    for name, layout in LAYOUTS.items():
        tier = open_disk(Path(out) / name, layout, CAPACITY)
        store(tier)
        tier.close()
