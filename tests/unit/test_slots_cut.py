"""A slot or a frame may be cut for blocks without windows, and is whole again when empty."""

import random
from unittest.mock import Mock

import pytest
import torch

from tests.support.caches import cache_of
from tests.support.chain_runner import chain_layout
from tiers.blocks.chain import Chain
from tiers.blocks.frames import FrameArena
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.blocks.part import Part
from tiers.blocks.places import BlockPlaces
from tiers.errors import CopyFailed
from tiers.memory.block import Block, BlockState
from tiers.memory.device import DevicePool, slot_nbytes
from tiers.policy.policy import Use
from tiers.transfer.ticket import Progress

FULL, SLIDING = LayerLayout(1, 8, 8), LayerLayout(1, 8, 8, window=40)
LAYOUT = BlockLayout((FULL, SLIDING, SLIDING, SLIDING), 16, "float32")
UNEVEN = BlockLayout((LayerLayout(1, 24, 8), *[LayerLayout(3, 8, 8, window=9)] * 3), 16, "float32")
SIZE = 4
ROOT = CacheScope(tenant=b"cut").root()


def rows_of(pool, slot):
    """The numbers in a slot that has an owner."""
    rows = pool.tensor[slot].view(-1)
    return rows[: pool._lasting] if pool.places.is_lesser(slot) else rows


def test_only_a_pool_of_windows_is_cut_and_no_block_takes_more_memory_than_it_needs():
    plain = BlockLayout((LayerLayout(1, 3, 3),), 5, "float32")  # 120 bytes: aligned to nothing
    assert plain.nbytes == slot_nbytes(plain)
    pool = DevicePool(plain, 3)
    assert (1, 3) == (pool.num_lesser, len(pool.tensor)) and pool.tensor.is_contiguous()
    assert pool.take(lesser=True) == 0 and not pool.places.is_lesser(0)
    assert LAYOUT.nbytes == slot_nbytes(LAYOUT)
    assert 0 <= slot_nbytes(UNEVEN) - UNEVEN.nbytes < 64 * UNEVEN.num_lesser
    for layout in (LAYOUT, UNEVEN):
        assert 12 * layout.num_lesser == len(DevicePool(layout, 12).tensor)


def test_a_copy_that_gives_other_numbers_is_not_used_and_a_refused_one_fails():
    pool, (frame,) = DevicePool(LAYOUT, 1), [FrameArena(LAYOUT, 1).take()]
    frame.tensor.fill_(1)
    calls = []

    def copy(targets, sources):
        calls.append(len(targets))
        if targets[0].dtype is torch.float32:
            raise RuntimeError("no memory")
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    pool.copy_by(lambda targets, sources: None)
    pool.copy_in([frame], [0])
    assert 1 == pool.tensor[0].min()
    pool.copy_by(copy)
    for copying in (lambda: pool.copy_in([frame], [0]), lambda: pool.copy_out(0, frame)):
        with pytest.raises(CopyFailed, match="no memory"):
            copying()
    assert [2, 1, 1] == calls


@pytest.mark.parametrize("layout", [LAYOUT, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("seed", range(5))
def test_slots_of_both_sizes_never_overlap_and_none_is_lost(operators, seed, layout):
    chance = random.Random(seed)
    pool = DevicePool(layout, 6)
    places = pool.places
    if seed % 2:
        pool.copy_by(torch.ops.cachesvc.copy)
    held = {}

    def fill(slot):
        held[slot] = torch.rand_like(rows_of(pool, slot))
        rows_of(pool, slot).copy_(held[slot])

    for _ in range(600):
        act = chance.random()
        if act < 0.5:
            slot = pool.take(lesser=chance.random() < 0.7)
            if slot is not None:
                fill(slot)
        elif held:
            slot = chance.choice(list(held))
            is_lesser = places.is_lesser(slot)
            rows = held.pop(slot)
            to = pool.take(lesser=chance.random() < 0.8) if act < 0.7 else None
            if act < 0.6 and not is_lesser:
                if to is not None:
                    pool.give(to)
                owner = pool.owners[slot]
                assert slot == pool.lessen(slot) and owner == pool.owners[slot]
                held[slot] = rows[: pool._lasting]
            elif to is not None:
                pool.move(slot, to)
                assert pool.owners[to] == pool.owners[slot]
                pool.give(slot)
                rows_of(pool, to)[pool._lasting :] = 0.5
                held[to] = rows_of(pool, to).clone()
                assert torch.equal(held[to][: pool._lasting], rows[: pool._lasting])
            elif act < 0.8:
                other = pool.reuse(slot, lesser=chance.random() < 0.5)
                if other is not None:
                    fill(other)
            else:
                pool.give(slot)
        lesser = [slot for slot in held if places.is_lesser(slot)]
        cut = {places.whole_of(slot) for slot in lesser}
        assert (len(held), len(cut)) == (places.num_taken, places.num_cut)
        assert 6 == len(held) - len(lesser) + len(cut) + places.num_free
        assert len(cut) * places.num_lesser == len(lesser) + places.num_lesser_free
        assert all(torch.equal(rows_of(pool, slot), rows) for slot, rows in held.items())
    for slot in held:
        pool.give(slot)
    assert (6, 0) == (pool.num_free, places.num_taken)
    assert all(pool.take() is not None for _ in range(6))


class Server:
    """A device, and a host if it has frames. Prompts of conversations run beside each other."""

    def __init__(self, num_blocks, windowed, num_frames=0):
        layout = chain_layout(SIZE, window=6, windowed=windowed)
        self.cache = cache_of(layout, num_blocks, num_frames)
        self.running = []

    def begin(self, chain):
        """Run a prompt, as far as there are slots. The ticket that it began with."""
        ticket = self.cache.open(chain)
        if self.cache.advance(ticket) is not Progress.READY:
            self.cache.close_ticket(ticket)
            return None
        num_hit, blocks = len(ticket.blocks), list(ticket.blocks)
        needed = chain.num_blocks - num_hit
        if needed > self.cache.num_allocatable:
            self.cache.close_ticket(ticket)
            return None
        blocks += self.cache.tables.plan(chain, num_hit)
        self.running.append((chain, blocks))
        for number in range(num_hit, len(blocks)):
            self.cache.tables.provide(blocks[number])  # there is room, so it says
            if number < len(chain.keys):
                blocks[number] = self.cache.tables.commit(chain, number, blocks[number])
        return ticket

    def end(self, place=0):
        chain, blocks = self.running.pop(place)
        self.cache.tables.release(chain, blocks, chain.num_tokens)


def prompt(kind, num_blocks):
    return Chain(ROOT, [9, 9, 9, 9, *[kind] * (num_blocks * SIZE - 2)], SIZE)


@pytest.mark.parametrize("seed", range(6))
def test_as_many_whole_slots_can_be_taken_as_are_said_to_be(seed):
    chance = random.Random(seed)
    server = Server(24, windowed=1 + seed % 3)
    residency = server.cache.residency
    lesser = 0
    for _ in range(200):
        if server.running and chance.random() < 0.55:
            server.end(chance.randrange(len(server.running)))
        else:
            server.begin(prompt(chance.randrange(5), chance.randint(1, 9)))
        in_use = {id(b): b for _, blocks in server.running for b in blocks if b.slot is not None}
        private = [b for b in in_use.values() if b.key is None and b.parent is None]
        residency.check(len(private))
        lesser = max(lesser, residency.pool.places.num_lesser_taken)
        if chance.random() < 0.05:
            said = residency.device.num_allocatable
            blocks = [Block(0.0) for _ in range(said + 1)]
            slots = [residency.take_slot(block, None) for block in blocks]
            assert [False] * said + [True] == [slot is None for slot in slots]
            for block in blocks[:said]:
                residency.take_back(block)
    assert lesser > 4


def conversation(server, kind, num_blocks):
    for _ in range(2):  # the second use needs the last windows alone
        assert server.begin(prompt(kind, num_blocks)) is not None
        server.end()


def test_windows_that_were_needed_again_stay():
    server = Server(23, windowed=3)
    conversation(server, 0, 10)
    short = Chain(ROOT, [9, 9, 9, 9, *[0] * 13], SIZE)  # ends with the fourth block
    assert server.begin(short) is not None
    server.end()
    for kind in (1, 2):
        conversation(server, kind, 10)
    blocks = server.cache.index.match(prompt(0, 10))
    assert [2, 3, 8, 9] == [block.depth for block in blocks[1:] if block.slot_whole]


def test_a_prefix_that_ends_in_a_block_without_windows_is_computed_and_then_whole():
    """No tier below has them. Its users read the block in its new slot."""
    server = Server(21, windowed=3)
    cache = server.cache
    for kind in range(3):
        conversation(server, kind, 10)
    assert server.begin(prompt(0, 10)) is not None  # uses its blocks without their windows
    _, blocks = server.running[0]
    block = blocks[3]
    assert block.slot is not None and cache.pool.places.is_lesser(block.slot)
    moved = cache.num_moved
    ticket = server.begin(Chain(ROOT, [9, 9, 9, 9, *[0] * 13], SIZE))
    assert ticket is not None and 1 == len(ticket.sources)  # the one whose windows stand
    assert block.ref_count == 2 and block.slot_whole and not cache.pool.places.is_lesser(block.slot)
    assert cache.num_moved > moved, "tables are made anew"
    server.end()
    server.end()
    cache.residency.check()
    ticket = server.begin(Chain(ROOT, [9, 9, 9, 9, *[0] * 13], SIZE))
    assert ticket is not None and 4 == len(ticket.sources)


def held_blocks(residency, lesser=(False, False)):
    """Blocks of one prompt, as many as `lesser` has, in use and on the device."""
    chain = Chain(ROOT, list(range(len(lesser) * SIZE)), SIZE)
    blocks = [Block(0.0) for _ in chain.keys]
    for number, (block, is_lesser) in enumerate(zip(blocks, lesser, strict=True)):
        residency.index.add(block, chain, number)
        block.state, block.ref_count = BlockState.READY, 1
        residency.take_slot(block, None, lesser=is_lesser)
    return blocks


@pytest.mark.parametrize("left_before", [[], [3]])
def test_blocks_beside_a_part_that_is_freed_move_so_that_a_whole_slot_is(left_before):
    """Slot 0 has blocks in all its parts, or in all but one that was free before those of slot 1,
    which has one block. The coldest leaves, and no other. Those beside it go to the other slot."""
    server = Server(3, windowed=3)
    residency, places = server.cache.residency, server.cache.pool.places
    assert 4 == places.num_lesser
    blocks = held_blocks(residency, lesser=[True] * 8)
    for block in blocks:
        residency.release(block, Use(1.0, ROOT))
    gone = [blocks[number] for number in left_before] + blocks[5:]
    for block in gone:
        residency.evict_device(block)
    asker, other = Block(0.0), Block(0.0)
    assert residency.take_slot(asker, None) is not None
    assert (0, 2) == (places.num_free, places.num_cut)
    assert residency.take_slot(other, None) is not None
    left = [block for block in blocks if block.slot is None]
    assert {*left} == {blocks[0], *gone}
    stayed = [block for block in blocks if block.slot is not None]
    assert {1} == {places.whole_of(block.slot) for block in stayed}
    residency.check(private_slots=2)


def test_no_block_is_moved_where_others_have_no_room_for_all(monkeypatch):
    server = Server(3, windowed=3)
    residency, pool = server.cache.residency, server.cache.pool
    blocks = held_blocks(residency, lesser=[True] * 8)
    for block in blocks:
        residency.release(block, Use(1.0, ROOT))
    assert residency.take_slot(Block(0.0), None) is not None, "one was whole"
    monkeypatch.setattr(pool, "move", lambda slot, to: pytest.fail("moved"))
    assert residency.take_slot(Block(0.0), None) is not None
    assert 4 == len([block for block in blocks if block.slot is not None])
    residency.check(private_slots=2)


def test_a_block_that_gets_room_for_its_windows_keeps_the_frame_that_has_them():
    """A block that leaves the device for it would take the only frame."""
    residency = Server(2, windowed=3, num_frames=16).cache.residency
    narrow, other = held_blocks(residency, lesser=(True, False))
    frame, *others = [residency.take_frame(None) for _ in range(16)]
    residency.settle_frame(narrow, frame)
    residency.release(other, Use(1.0, ROOT))
    assert residency.device_room.widen(narrow) and other.slot is None
    assert narrow.frame is frame and not residency.pool.places.is_lesser(narrow.slot)
    for each in others:
        residency.give_frame(each)
    residency.check()


def test_a_block_whose_move_fails_stays_where_it_is(monkeypatch):
    server = Server(21, windowed=3)
    pool = server.cache.pool

    refuse = Mock(side_effect=CopyFailed("the device refused to copy a block: test"))
    monkeypatch.setattr(pool, "move", refuse)
    for kind in range(4):
        conversation(server, kind, 10)
        server.cache.residency.check()
    monkeypatch.undo()
    block = next(
        b for b in server.cache.index if b.slot is not None and pool.places.is_lesser(b.slot)
    )
    residency = server.cache.residency
    slot = block.slot
    residency.acquire(block)
    monkeypatch.setattr(pool, "move", refuse)
    with pytest.raises(CopyFailed):
        residency.device_room.widen(block)
    assert slot == block.slot and not block.slot_whole
    residency.release(block, Use(1.0, ROOT))
    residency.check()


def test_windows_that_leave_the_device_are_on_the_host_first():
    """Nobody else has them, and a prompt that ends there needs them."""
    server = Server(21, windowed=3, num_frames=64)
    places = server.cache.pool.places
    for kind in range(3):
        conversation(server, kind, 10)
    blocks = server.cache.index.match(prompt(0, 10))
    narrow = [b for b in blocks if b.slot is not None and places.is_lesser(b.slot)]
    assert narrow and all(b.frame and b.frame.part is Part.WHOLE for b in narrow)
    ticket = server.begin(Chain(ROOT, [9, 9, 9, 9, *[0] * 13], SIZE))
    assert ticket is not None and 4 == len(ticket.sources)
    server.cache.residency.check()


def test_windows_that_only_the_device_has_stay_there():
    """The disk had them when the block's other part was copied to the host, and dropped them."""
    residency = Server(2, windowed=3, num_frames=16).cache.residency
    colder, only = held_blocks(residency)
    frame = residency.take_frame(None, lesser=True)
    assert frame is not None and frame.part is Part.LASTING
    residency.settle_frame(only, frame)
    residency.release(colder, Use(1.0, ROOT))
    residency.release(only, Use(2.0, ROOT, windows=False))
    residency.device.passed.sync(only)
    assert residency.take_slot(Block(0.0), None) is not None
    assert only.slot_whole and colder.slot is None
    residency.check(private_slots=1)


def bytes_of(frame):
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
    held = {}

    def fill(frame):
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


def test_parts_of_a_place_that_is_to_be_emptied_are_taken_last():
    places = BlockPlaces(2, 4)
    first = [places.take(lesser=True) for _ in range(3)]
    second = places.take()
    places.lessen(second)
    places.take_last(first[0])
    taken = [places.take(lesser=True) for _ in range(4)]
    assert [1, 1, 1, 0] == [places.whole_of(place) for place in taken if place is not None]


def test_a_place_given_back_twice_is_noticed():
    places = BlockPlaces(1, 1)
    place = places.take()
    places.give(place)
    with pytest.raises(AssertionError, match="back twice"):
        places.give(place)
