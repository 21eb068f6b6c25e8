"""Blocks between vLLM's KV tensors and rows of host memory: every byte in its place, in few copies.

Triton decides at its import whether kernels are interpreted, so the tests of the device's path run
in a child process that sets the variable first.
"""

import pytest
import torch

from cachesvc.model_files import UnsupportedKv
from cachesvc.vllm import slabs as slabs_module
from cachesvc.vllm.slabs import DeviceCopier, HostCopier, runs_of, slabs_of
from tests.support.interpreted import TIMEOUT_S, in_child, in_parent, run_in_child
from tests.support.torch_calls import Recorder

NUM_BLOCKS, NUM_FRAMES, STRIDE = 9, 40, 4096
FRAMES, BLOCKS = [5, 6, 7, 20, 8, 9, 3], [8, 0, 3, 4, 1, 6, 5]

copiers = pytest.mark.parametrize(
    "kind", ["host", pytest.param("device", marks=in_child)], ids=["host", "device"]
)


def slabs_like_vllm(num_blocks=NUM_BLOCKS, seed=1):
    """Layers of several sizes: K and V beside each other, apart, one of latents, and a state in
    larger pages."""
    random = torch.Generator().manual_seed(seed)

    def filled(*shape):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)

    layers = [filled(num_blocks, 2, 8, 24), filled(2, num_blocks, 8, 40), filled(num_blocks, 8, 72)]
    layers.append(filled(num_blocks, 256)[:, None, None, :168])
    return [slab for layer in layers for slab in slabs_of(layer, num_blocks)]


def copier_of_kind(kind, slabs):
    return HostCopier(slabs) if kind == "host" else DeviceCopier(slabs, STRIDE)


def rows_like_a_nodes():
    random = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (NUM_FRAMES, STRIDE), dtype=torch.uint8, generator=random)


def block_of(slabs, number):
    return torch.cat([slab[number] for slab in slabs])


def test_slabs_are_views_in_the_order_of_memory():
    assert [(9, 384), (9, 320), (9, 320), (9, 576), (9, 168)] == [
        tuple(s.shape) for s in slabs_like_vllm()
    ]
    with pytest.raises(UnsupportedKv):
        slabs_of(torch.zeros(4, 9, 2, 8)[:, :, :, ::2], 9)
    with pytest.raises(UnsupportedKv):
        slabs_of(torch.zeros(2, 8, 9, 4), 9)


@pytest.mark.parametrize(
    ("frames", "piece", "runs"),
    [
        ([], 4, []),
        ([3], 4, [(0, 1)]),
        ([1, 2, 3, 4, 5], 100, [(0, 5)]),
        ([1, 2, 3, 4, 5], 4, [(0, 3), (3, 5)]),
        ([4, 3, 2], 100, [(0, 1), (1, 2), (2, 3)]),
        ([7, 8, 2, 3], 8, [(0, 1), (1, 2), (2, 4)]),
    ],
)
def test_a_run_is_of_successive_frames_of_one_registration(frames, piece, runs):
    assert runs == list(runs_of(frames, piece))


@copiers
@pytest.mark.parametrize("stage_rows", [2, 3, 100])
def test_every_byte_of_a_block_goes_to_its_place_and_none_beside(kind, stage_rows, monkeypatch):
    monkeypatch.setattr(slabs_module, "STAGE_BYTES", stage_rows * STRIDE)
    slabs, rows = slabs_like_vllm(), rows_like_a_nodes()
    before = [slab.clone() for slab in slabs]
    size = sum(slab.shape[1] for slab in slabs)
    copier_of_kind(kind, slabs).load(rows, FRAMES, BLOCKS, piece=6)
    for number in range(NUM_BLOCKS):
        expected = block_of(before, number)
        if number in BLOCKS:
            expected = rows[FRAMES[BLOCKS.index(number)], :size]
        assert torch.equal(block_of(slabs, number), expected)

    saved = torch.zeros_like(rows)
    copier_of_kind(kind, slabs).save(saved, FRAMES, BLOCKS, piece=6)
    for frame in range(NUM_FRAMES):
        if frame in FRAMES:
            assert torch.equal(saved[frame, :size], rows[frame, :size])
        else:
            assert not saved[frame].any()


@copiers
@pytest.mark.parametrize(("frames", "blocks"), [([NUM_FRAMES], [0]), ([0], [NUM_BLOCKS])])
def test_a_number_outside_is_refused_before_a_byte_moves(kind, frames, blocks):
    slabs, rows = slabs_like_vllm(), rows_like_a_nodes()
    copier = copier_of_kind(kind, slabs)
    for copy in (copier.load, copier.save):
        with pytest.raises(IndexError):
            copy(rows, frames, blocks, 100)


def test_on_a_cpu_each_piece_is_copied_once_and_by_no_other_thread(monkeypatch):
    """torch shares a copy of 98 kB among its threads, which belong to vLLM's model."""
    slabs, rows, copied = slabs_like_vllm(), rows_like_a_nodes(), []
    monkeypatch.setattr(slabs_module, "_memcpy", lambda to, source, size: copied.append(size))
    with Recorder() as recorder:
        HostCopier(slabs).load(rows, FRAMES, BLOCKS, piece=6)
    assert 5 * len(FRAMES) == len(copied)
    assert {} == recorder.calls


@in_child
def test_on_a_gpu_copies_and_launches_follow_the_runs_and_not_layers_times_blocks(monkeypatch):
    """128 blocks of 5 slabs: 640 copies one by one."""
    from cachesvc.vllm import kernel

    slabs, rows = slabs_like_vllm(128), torch.zeros(160, STRIDE, dtype=torch.uint8)
    copier, launches = DeviceCopier(slabs, STRIDE), []
    monkeypatch.setattr(
        kernel.SlabTable, "move", lambda self, stage, blocks, gather: launches.append(len(blocks))
    )
    frames = [*range(10, 74), *range(80, 144)]
    for copy in (copier.load, copier.save):
        with Recorder() as recorder:
            copy(rows, frames, list(range(128)), 64)
        # Frames 10..63, 64..73, 80..127 and 128..143.
        assert 4 == recorder.calls["copy_"], recorder.calls
    assert [128, 128] == launches


@in_child
@pytest.mark.parametrize("way", ["load", "save"])
def test_after_a_refused_copy_those_before_it_have_ended(way, monkeypatch):
    """The node gives the frames to others at once, and vLLM the blocks."""
    slabs, rows = slabs_like_vllm(), rows_like_a_nodes()
    copier, events = DeviceCopier(slabs, STRIDE), []

    def two_runs(*_):
        yield rows[:1], copier._stage[:1]
        events.append("refused")
        yield rows[:1], torch.empty(3)  # no copy between these

    monkeypatch.setattr(copier, "_runs", two_runs)
    monkeypatch.setattr(copier, "_wait", lambda: events.append("waited"))
    with pytest.raises(RuntimeError):
        getattr(copier, way)(rows, FRAMES, BLOCKS, 6)
    assert ["refused", "waited"] == events


@in_child
@pytest.mark.parametrize("odd", [2, 4, 6, 7])
def test_slabs_of_odd_sizes_are_moved_in_narrower_words(odd):
    random = torch.Generator().manual_seed(odd)
    shapes = [(NUM_BLOCKS, odd * 11), (NUM_BLOCKS, 8 * odd)]
    slabs = [torch.randint(0, 256, s, dtype=torch.uint8, generator=random) for s in shapes]
    rows = torch.zeros(NUM_FRAMES, STRIDE, dtype=torch.uint8)
    DeviceCopier(slabs, STRIDE).save(rows, FRAMES, BLOCKS, 100)
    for frame, block in zip(FRAMES, BLOCKS, strict=True):
        assert torch.equal(rows[frame, : 19 * odd], block_of(slabs, block))


@in_parent
@pytest.mark.timeout(TIMEOUT_S)
def test_the_kernel_under_the_interpreter():
    told = run_in_child(__file__, loops=True)
    assert "skipped" in told and "25 passed" in told, told
