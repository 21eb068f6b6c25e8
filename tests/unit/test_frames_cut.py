"""A frame may be cut into frames for blocks without windows, and is whole again when empty."""

import random

import pytest

from tiers.blocks.frames import Frame, FrameArena
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.blocks.part import Part

FULL, SLIDING = LayerLayout(1, 8, 8), LayerLayout(1, 8, 8, window=40)
LAYOUT = BlockLayout((FULL, SLIDING, SLIDING, SLIDING), 16, "float32")


def bytes_of(frame: Frame) -> int:
    return LAYOUT.lasting_nbytes if frame.is_lesser else LAYOUT.nbytes


def test_how_many_go_into_a_frame():
    assert 4 == LAYOUT.num_lesser
    assert 1 == BlockLayout((FULL, FULL), 16, "float32").num_lesser
    assert 1 == BlockLayout((*[FULL] * 9, SLIDING), 16, "float32").num_lesser, "too little is saved"
    assert 8 == BlockLayout((FULL, *[SLIDING] * 20), 16, "float32").num_lesser
    assert 8 == BlockLayout((SLIDING, SLIDING), 16, "float32").num_lesser, "of windows alone"


@pytest.mark.parametrize("seed", range(5))
def test_frames_of_both_sizes_never_overlap_and_none_is_lost(seed):
    chance = random.Random(seed)
    arena = FrameArena(LAYOUT, 6)
    held: dict[Frame, bytes] = {}

    def fill(frame: Frame) -> None:
        held[frame] = chance.randbytes(bytes_of(frame))
        frame.buffer[:] = held[frame]

    for _ in range(600):
        act = chance.random()
        if act < 0.5:
            frame = arena.take(lesser=chance.random() < 0.7)
            if frame is not None:
                fill(frame)
        elif held:
            frame = chance.choice(list(held))
            data = held.pop(frame)
            if act < 0.6 and not frame.is_lesser:
                number, frame = frame.number, arena.lessen(frame)
                assert number == frame.number
                held[frame] = data[: LAYOUT.lasting_nbytes]
            elif act < 0.75:
                other = arena.reuse(frame, lesser=chance.random() < 0.5)
                if other is not None:
                    fill(other)
            else:
                arena.give(frame)
        assert len(held) == arena.num_taken
        parts = {frame.is_lesser: frame.part for frame in held}
        assert parts.items() <= {True: Part.LASTING, False: Part.WHOLE}.items()
        assert all(bytes(frame.buffer) == data for frame, data in held.items())
        assert all(frame.tensor.numel() * 4 == len(frame.buffer) for frame in held)
    for frame in held:
        arena.give(frame)
    assert (6, 0) == (arena.num_free, arena.num_taken)
    assert all(arena.take() is not None for _ in range(6))
