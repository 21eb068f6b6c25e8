"""What a block's bytes are: the same as ever for today's models, and parts of any shape beside."""

import pytest
import torch

from engine.attention.kv_pool import KvPool
from tiers.blocks.layout import BlockLayout, LayerLayout, part_views, sized_layout
from tiers.memory.device import DevicePool

LATENT = LayerLayout(1, 576, 512, shared=True)
MIXED = (LayerLayout(2, 16, 16), LayerLayout(1, 32, 8), LayerLayout(1, 40, 32, shared=True))
STATES = (
    LayerLayout(1, 16, 16, shared=True, window=6),
    LayerLayout(2, 16, 16),
    LayerLayout(1, 8, 8, shared=True, window=3, rows=3),
)


def test_digests_of_other_layouts_are_golden_and_differ():
    latent = BlockLayout((LATENT,) * 61, 64, "bfloat16")
    assert "e2ef11c52b51c6b0f6eb3c9a3a18339e" == latent.digest().hex()
    other = BlockLayout((LayerLayout(1, 576, 448, shared=True),) * 61, 64, "bfloat16")
    halves = BlockLayout((LayerLayout(1, 288, 288),) * 61, 64, "bfloat16")
    assert latent.nbytes == other.nbytes == halves.nbytes
    assert 3 == len({latent.digest(), other.digest(), halves.digest()})


def test_layers_with_windows_come_last_and_have_a_digest_of_their_own():
    sliding = LayerLayout(2, 16, 16, window=24)
    layout = BlockLayout((sliding, LayerLayout(2, 16, 16), sliding), 16, "float32")
    assert (2, layout.nbytes // 3) == (layout.reach, layout.lasting_nbytes)
    assert "a741080060572d06b996708cab123b4a" == layout.digest().hex()
    plain = BlockLayout.uniform(3, 16, 2, 16, "float32")
    wider = BlockLayout((LayerLayout(2, 16, 16, window=25), *layout.layers[1:]), 16, "float32")
    assert 3 == len({each.digest() for each in (layout, plain, wider)})
    assert (0, plain.nbytes) == (plain.reach, plain.lasting_nbytes)
    assert plain.shape == layout.shape
    blocks = torch.arange(layout.nbytes // 4).view(1, *layout.shape)
    firsts = [parts[0].flatten()[0].item() for parts in part_views(blocks, layout.layers)]
    assert [1024, 0, 2048] == firsts


@pytest.mark.parametrize(
    ("layer", "num_layers", "dtype", "expected"),
    [
        (LayerLayout(3, 64, 64), 30, "float32", 64),  # SmolLM2-135M
        (LayerLayout(3, 64, 64), 30, "bfloat16", 64),
        (LATENT, 61, "bfloat16", 64),  # DeepSeek-V3
        (LayerLayout(2, 256, 256), 12, "bfloat16", 64),  # Qwen3-Next-80B
        (LayerLayout(2, 64, 64), 24, "bfloat16", 64),  # Qwen2.5-0.5B
        (LayerLayout(1, 128, 128), 16, "bfloat16", 64),  # just enough
        (LATENT, 7, "bfloat16", 128),  # Kimi-Linear-48B
        (LATENT, 7, "float32", 64),
        (LayerLayout(1, 445, 445, shared=True), 1, "bfloat16", 256),  # 890 bytes a token
    ],
)
def test_small_kv_gets_longer_blocks_unless_their_size_is_set(layer, num_layers, dtype, expected):
    layers = (layer,) * num_layers
    assert expected == sized_layout(layers, dtype).block_size
    assert 64 == sized_layout(layers, dtype, block_size=64).block_size


@pytest.mark.parametrize("layers", [MIXED, (LATENT,) * 2, (LayerLayout(2, 16, 16),) * 3, STATES])
def test_parts_tile_a_block_without_gap_or_overlap(layers):
    layout = BlockLayout(layers, 4, "float32")
    blocks = torch.zeros(3, *layout.shape)
    number = 0
    for layer, parts in zip(layers, part_views(blocks, layers), strict=True):
        for part in parts:
            assert part.shape[:2] == (3, layer.rows_of(4))
            part[1] = torch.arange(number, number + part[1].numel()).view(part[1].shape)
            number += part[1].numel()
    assert torch.equal(torch.arange(layout.nbytes // 4), blocks[1].flatten().long().sort().values)
    assert 0 == blocks[::2].abs().max()


@pytest.mark.parametrize("layers", [MIXED, (LATENT,) * 2, (LayerLayout(2, 16, 16),) * 3])
def test_the_first_rows_of_a_block_are_copied_in_every_part(layers):
    pool = DevicePool(BlockLayout(layers, 4, "float32"), 2)
    pool.tensor.copy_(torch.rand(pool.tensor.shape))
    before = pool.tensor.clone()
    pool.copy_rows(0, 1, 3)
    for kept, old in zip(
        KvPool(pool.tensor, layers).layers, KvPool(before, layers).layers, strict=True
    ):
        for part, was in ((kept.key, old.key), (kept.value, old.value)):
            assert torch.equal(part[1, :3], was[0, :3])
            assert torch.equal(part[1, 3], was[1, 3])
            assert torch.equal(part[0], was[0])
