"""Working copies outlive their sequences, and serve what begins with the same blocks only."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.base import AttentionCall, AttentionOptions, ReferenceAttention
from engine.attention.copies import FreeRanges, WorkingCopies, _num_shared
from engine.attention.cpu import CpuAttention
from engine.attention.kv_pool import KvPool
from engine.batch import Span
from tests.parity.attending import attended
from tests.parity.attending import span as span_of
from tiers.blocks.layout import BlockLayout, LayerLayout

BLOCK, SLOTS, HEADS, DIM = 16, 24, 2, 8
COPY_BYTES = 256 * 2 * 2 * HEADS * DIM * 4  # of a short sequence of "plain"
PLAIN = LayerLayout(HEADS, DIM, DIM)
MODELS = {
    "plain": (PLAIN, PLAIN),
    "windows": (PLAIN, LayerLayout(HEADS, DIM, DIM, window=20)),
    "two sizes of head": (PLAIN, LayerLayout(1, 16, 16)),
}


class Pool:
    """A pool whose slots change owners, and the attentions over it."""

    def __init__(self, layers: Sequence[LayerLayout], budget_bytes: int = 1 << 24) -> None:
        self.layers = layers
        shape = BlockLayout(layers, BLOCK, "float32").shape
        self.tensor = torch.randn(SLOTS, *shape)
        self.owners = [*range(1, SLOTS + 1)]
        self.fast = CpuAttention(self.tensor, layers, self.owners, budget_bytes=budget_bytes)
        self._numbers, self._seeds = count(SLOTS + 1), count()

    def hand_on(self, slot: int) -> None:
        """Another block comes into the slot."""
        self.owners[slot] = next(self._numbers)
        self.tensor[slot] = torch.randn(self.tensor.shape[1:])

    def check_step(self, spans: Sequence[Span]) -> None:
        """One step of both attentions, which must agree and leave the same pool."""
        before = self.tensor.clone()
        given = self.layers, spans, AttentionOptions(scaling=0.3), 4, next(self._seeds)
        expected = attended(ReferenceAttention(before, self.layers), *given)
        torch.testing.assert_close(attended(self.fast, *given), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(before, self.tensor)

    @property
    def copies(self) -> WorkingCopies:
        return self.fast._copies


def span(sequence_id: int, table: list[int], start: int, num_tokens: int = 1) -> Span:
    return span_of(sequence_id, start, num_tokens, table)


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Positions that were brought over from the pool."""
    seen: list[tuple[int, int]] = []
    fill = WorkingCopies._fill_run

    def watched(self, number, copy, block_table, first, end):
        seen.append((first, end))
        fill(self, number, copy, block_table, first, end)

    monkeypatch.setattr(WorkingCopies, "_fill_run", watched)
    return seen


def test_a_prompt_takes_over_the_copy_of_one_that_ended(filled):
    pool = Pool(MODELS["plain"])
    pool.check_step([span(1, [0, 1, 2, 3], 40)])
    pool.fast.forget(1)
    filled.clear()
    pool.check_step([span(2, [0, 1, 5, 6], 50)])  # two blocks are the same, 18 tokens are not
    assert filled == [(32, 50)]


def test_a_slot_with_a_new_owner_is_read_again(filled):
    pool = Pool(MODELS["plain"])
    pool.check_step([span(1, [0, 1, 2, 3], 56)])
    pool.fast.forget(1)
    pool.hand_on(1)
    filled.clear()
    pool.check_step([span(2, [0, 1, 2, 3], 40)])
    assert filled == [(0, 40)], "one block saved and two lost are no gain"
    pool.check_step([span(3, [0, 9], 17)])
    assert filled[1:] == [(0, 17)], "the copy of a running sequence is its own"


def test_a_block_that_was_half_full_is_read_again(filled):
    pool = Pool(MODELS["plain"])
    pool.check_step([span(1, [0, 1], 10, 10)])
    pool.fast.forget(1)
    filled.clear()
    pool.check_step([span(2, [0, 1, 2], 40)])
    assert filled == [(16, 40)]


def test_rows_of_a_failed_step_are_not_served():
    pool = Pool(MODELS["plain"])
    pool.check_step([span(1, [0, 1, 2], 40)])
    pool.fast.begin([span(1, [0, 1, 2], 10, 8)])
    noise = torch.ones(8, HEADS, DIM)
    pool.fast.attend(
        AttentionCall(0, torch.ones(8, 4, DIM), noise, noise, AttentionOptions(scaling=0.3))
    )
    pool.fast.forget(1)
    pool.check_step([span(2, [0, 1, 2], 36)])


@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("budget", [1 << 24, 1 << 18, 1 << 17], ids=["ample", "scarce", "one"])
def test_attention_always_sees_the_pools_contents(layers, budget):
    """Sequences begin with blocks of others, grow, end; slots are handed on as they are free."""
    for seed in range(12):
        torch.manual_seed(seed)
        chance = random.Random(seed)
        pool = Pool(layers, budget)
        tables: dict[int, list[int]] = {}
        lengths: dict[int, int] = {}
        ended: list[list[int]] = []  # tables whose full blocks stand
        ids = count(1)
        for _ in range(40):
            if tables and chance.random() < 0.4:
                number = chance.choice([*tables])
                pool.fast.forget(number)
                ended.append(tables.pop(number)[: lengths.pop(number) // BLOCK])
            held = {slot for table in tables.values() for slot in table}
            free = [slot for slot in range(SLOTS) if slot not in held]
            if len(free) > 6 and chance.random() < 0.6:
                shared = chance.choice(ended) if ended and chance.random() < 0.8 else []
                shared = shared[: chance.randint(0, 4)]
                own = chance.sample([slot for slot in free if slot not in shared], 6 - len(shared))
                for slot in own:
                    pool.hand_on(slot)
                ended = [t[: next((i for i, s in enumerate(t) if s in own), len(t))] for t in ended]
                number = next(ids)
                tables[number] = [*shared, *own]
                lengths[number] = len(shared) * BLOCK
            spans = [
                span(number, tables[number], lengths[number], chance.choice([1, 1, 1, 5, 20]))
                for number in chance.sample([*tables], chance.randint(0, len(tables)))
                if lengths[number] < 5 * BLOCK - 20
            ]
            if spans:
                pool.check_step(spans)
            for one in spans:
                lengths[one.sequence_id] += len(one.tokens)


@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_free_memory_in_pieces_serves_a_long_prompt(layers):
    """Short sequences that lie between ended long ones left no room for a copy in one piece."""
    pool = Pool(layers)
    token_bytes = pool.copies._token_items * torch.float32.itemsize
    pool = Pool(layers, 4096 * token_bytes)
    prompts = {number: 100 if number % 2 else 600 for number in range(8)}  # 256 and 768 in a copy
    spans = [
        replace(span(number, [number], 0, 5), num_prompt_tokens=prompt)
        for number, prompt in prompts.items()
    ]
    pool.check_step(spans)
    for number in range(0, 8, 2):
        pool.fast.forget(number)
    later = [replace(one, start=5) for one in spans[1::2]]
    long = replace(span(99, [9], 0, 5), num_prompt_tokens=1500)
    pool.check_step([later[0], long, *later[1:]])
    assert 99 in pool.copies._running
    pool.check_step([replace(one, start=one.start + 5) for one in (*later, long)])


def test_a_system_that_promises_less_memory_gives_fewer_copies():
    """As one without overcommit, or with a limit of address space, does."""
    pool = Pool(MODELS["plain"], budget_bytes=1 << 60)
    assert len(pool.copies._buffer) * 4 < 1 << 60
    pool.check_step([span(1, [0, 1], 20)])


def test_without_owners_no_copy_outlives_its_sequence():
    kv = KvPool(torch.randn(SLOTS, *BlockLayout(MODELS["plain"], BLOCK, "float32").shape))
    copies = WorkingCopies(kv, budget_bytes=1 << 20)
    one = span(1, [0, 1], 20)
    copy = copies.open(one, {1})
    copies.finish(copy, one)
    copies.forget(1)
    assert (copies._ended, copies._free._ranges) == ({}, [(0, 1 << 18)])


def test_a_kept_copy_gives_way_before_a_step_waits_for_fresh_memory():
    pool = Pool(MODELS["plain"])
    pool.copies.lazy_memory.touch(2 * COPY_BYTES)
    for number in range(4):
        pool.check_step([span(number, [2 * number, 2 * number + 1], 20)])
        pool.fast.forget(number)
        assert min(2, number + 1) == len(pool.copies._ended)
    pool.copies.lazy_memory.touch(COPY_BYTES)
    pool.check_step([span(9, [20, 21], 20)])
    assert 2 == len(pool.copies._ended), "there is room for one more"
    assert 3 * COPY_BYTES == pool.copies.lazy_memory.num_used()
    pool.check_step([span(10, [22, 23], 20), span(11, [0, 1], 20), span(12, [2, 3], 20)])
    assert 4 * COPY_BYTES == pool.copies.lazy_memory.num_used(), "of sequences that run"


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_two_prompts_share_their_common_prefix(one, other):
    shared = _num_shared(one, other)
    assert one[:shared] == other[:shared]
    assert one[shared : shared + 1] != other[shared : shared + 1] or one == other


@given(st.lists(st.integers(1, 30)), st.randoms(use_true_random=False), st.integers(20, 100))
def test_free_ranges_never_overlap_and_join_again(sizes, chance, limit):
    ranges = FreeRanges(100)
    taken: dict[int, int] = {}
    for size in sizes:
        start = ranges.take(size, limit)
        if start is None:
            free = [place for place in range(limit) if not _in(taken, place)]
            runs = "".join("." if place in free else "x" for place in range(limit))
            assert "." * size not in runs
        else:
            assert start + size <= limit
            assert not any(_in(taken, place) for place in range(start, start + size))
            taken[start] = size
        if taken and chance.random() < 0.5:
            start = chance.choice([*taken])
            ranges.give(start, taken.pop(start))
    for start, size in taken.items():
        ranges.give(start, size)
    assert ranges._ranges == [(0, 100)]


def _in(taken: dict[int, int], place: int) -> bool:
    return any(start <= place < start + size for start, size in taken.items())
