"""The order of copies and compute on a GPU, written down by streams that only note what they do.

No GPU is needed: `DevicePool` asks torch for streams and events, and these stand in for them. What
an event saw is everything its stream had been given, or waited for, until then.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tiers.blocks.frames import Frame, FrameArena
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.blocks.part import Part
from tiers.errors import CopyFailed
from tiers.memory.device import DevicePool

LAYOUT = BlockLayout.uniform(
    num_layers=1, block_size=2, num_kv_heads=1, head_dim=2, dtype="float32"
)
WINDOWED = BlockLayout((LayerLayout(1, 2, 2), *[LayerLayout(1, 2, 2, window=3)] * 2), 2, "float32")


class Stream:
    """Notes which work it is behind."""

    current: "Stream"

    def __init__(self, *_: object) -> None:
        self.behind: set[str] = set()

    def wait_stream(self, other: "Stream") -> None:
        self.behind |= other.behind

    def wait_event(self, event: "Event") -> None:
        self.behind |= event.behind

    def synchronize(self) -> None:
        """Nothing is under way here."""


class Event:
    """Sees what its stream is behind."""

    ended = False

    def record(self, stream: Stream) -> None:
        self.behind = set(stream.behind)

    def query(self) -> bool:
        return self.ended


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> DevicePool:
    """A pool in ordinary memory that believes in streams."""

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, Stream.current = Stream.current, stream
        yield
        Stream.current = before

    Stream.current = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    return noting(LAYOUT, monkeypatch)


@pytest.fixture
def windowed(pool: DevicePool, monkeypatch: pytest.MonkeyPatch) -> DevicePool:
    """The same, of slots that can be cut."""
    return noting(WINDOWED, monkeypatch)


def noting(layout: BlockLayout, monkeypatch: pytest.MonkeyPatch) -> DevicePool:
    made = DevicePool(layout, 4)
    made._down, made._up = Stream(), Stream()
    enqueue = made._enqueue

    def noted(stream: Stream, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        event = enqueue(stream, pairs)
        name = "copy out" if stream is made._down else "copy in"
        stream.behind.add(name)
        event.behind = {*event.behind, name}
        return event

    monkeypatch.setattr(made, "_enqueue", noted)
    return made


def compute() -> set[str]:
    return Stream.current.behind


def test_copying_down_ahead_of_need_does_not_hold_up_compute(pool):
    (frame,) = [FrameArena(LAYOUT, 1).take()]
    slot, other = pool.take(), pool.take()
    compute().add("step 1")
    pool.copy_out(slot, frame)
    assert {"step 1"} == compute()
    assert pool._down is not None and "step 1" in pool._down.behind
    pool.give(other)
    assert other == pool.take()
    assert {"step 1"} == compute(), "another slot's new owner waits for nothing"


@pytest.mark.parametrize("freed", [False, True])
def test_a_new_owner_writes_only_after_the_last_ones_rows_are_out(pool, freed):
    (frame,) = [FrameArena(LAYOUT, 1).take()]
    slot = pool.take()
    pool.copy_out(slot, frame)
    if freed:
        pool.give(slot)
        assert slot == pool.take()
    else:
        assert slot == pool.hand_on(slot)
    assert "copy out" not in compute(), "nobody has written yet"
    pool.settle(slot)
    assert "copy out" in compute()


def test_a_slot_that_is_filled_from_a_frame_makes_only_the_upload_wait(pool):
    """Of 4 GB that leave, compute would wait 80 ms."""
    first, second = frames_of(2)
    slot = pool.take()
    pool.copy_out(slot, first)
    pool.hand_on(slot)
    pool.copy_in([second], [slot])
    assert pool._up is not None and "copy out" in pool._up.behind
    assert set() == compute()
    pool.settle(slot)
    assert "copy in" in compute()


def test_slots_that_share_memory_wait_for_each_others_copies(windowed):
    """A part of a slot that is cut goes to a new owner before the whole block is out."""
    pool = windowed
    (frame,) = frames_of(1, WINDOWED)
    whole = pool.take()
    pool.copy_out(whole, frame)
    pool.lessen(whole)
    part, other = pool.take(lesser=True), pool.take()
    assert part is not None and other is not None and part != whole
    pool.move(other, part)
    assert "copy out" in compute(), "compute writes to the part"
    pool.copy_out(whole, frame)
    pool.give(part)
    assert part == pool.take(lesser=True)
    (lesser,) = frames_of(1, WINDOWED)
    lesser.part = Part.LASTING
    compute().clear()
    pool.copy_in([lesser], [part], [Part.LASTING])
    assert pool._up is not None and "copy out" in pool._up.behind
    assert not pool.arrived(part)
    pool.copy_out(whole, frame)
    assert pool._down is not None and "copy in" in pool._down.behind
    pool.settle(whole)
    assert "copy in" in compute(), "it may be its memory"


def frames_of(count: int, layout: BlockLayout = LAYOUT) -> list[Frame]:
    arena = FrameArena(layout, count)
    return [frame for frame in (arena.take() for _ in range(count)) if frame is not None]


def test_a_block_that_comes_up_holds_up_nobody_and_has_arrived_when_it_stands(pool, monkeypatch):
    compute().add("step 1")
    pool.copy_in(frames_of(2), [1, 2])
    assert {"step 1"} == compute()
    assert pool._up is not None and "step 1" in pool._up.behind
    assert pool.is_arriving and not pool.arrived(1) and pool.arrived(3)
    monkeypatch.setattr(Event, "ended", True)
    assert pool.arrived(1) and not pool.is_arriving
    pool.settle(2)
    assert {"step 1"} == compute(), "what has arrived is not waited for"


@pytest.mark.parametrize("use", ["settle", "copy_rows", "new owner"])
def test_who_uses_a_slot_before_it_has_arrived_waits_for_it(pool, use):
    pool.copy_in(frames_of(1), [1])
    if use == "settle":
        pool.settle(1)
    elif use == "copy_rows":
        pool.copy_rows(1, 2, 1)
    else:
        pool.settle(pool.hand_on(1))
    assert "copy in" in compute()


def test_a_frame_comes_up_only_after_it_went_down_and_goes_down_after_it_came_up(pool):
    first, second = frames_of(2)
    pool.copy_out(0, first)
    pool.copy_in([second], [1])
    up, down = pool._up.behind, pool._down.behind
    assert "copy out" not in up, "another frame waits for nothing"
    pool.copy_in([first], [2])
    assert "copy out" in up
    assert "copy in" not in down
    pool.copy_out(2, second)
    assert "copy in" in down


def test_after_a_refused_copy_nothing_of_its_batch_is_under_way(pool, monkeypatch):
    """The slots and frames of the copies before it in the batch get other owners."""
    first, second = frames_of(2)
    waited: list[bool] = []
    monkeypatch.setattr(Stream, "synchronize", lambda stream: waited.append(stream is pool._up))
    monkeypatch.setattr(pool, "_pair", lambda target, source, part: (torch.empty(3), source[:, :2]))
    with pytest.raises(CopyFailed, match="refused to copy a block"):
        pool.copy_in([first, second], [1, 2])
    assert [True] == waited
    assert not pool.is_arriving
