"""The node's memory under a GPU: locked while it is used, and never under other pages.

A stand-in registers memory as CUDA does. That no page of a registered piece goes back to the system
is tested in `tests/sim/test_node_lives.py`.
"""

import logging
import threading
from contextlib import ExitStack, closing, contextmanager
from unittest.mock import Mock

import pytest
import torch

from cachesvc.vllm import carrier as carrier_module
from cachesvc.vllm import locked as locked_module
from cachesvc.vllm import slabs as slabs_module
from cachesvc.vllm.carrier import Carrier
from cachesvc.vllm.groups import KvGroup
from cachesvc.vllm.identity import EngineIdentity
from cachesvc.vllm.locked import LockedMemory
from cachesvc.vllm.transfers import GroupBlocks, Transfer
from tests.patience import until
from tests.unit.test_frames_pinned import Cudart
from tests.unit.test_node_socket import LAYOUT, below, joined, prompt, serving
from tiers.blocks.keys import CacheScope
from tiers.errors import NodeError
from tiers.node import arena
from tiers.node.arena import frame_stride

PIECE = 4  # frames
STRIDE = frame_stride(LAYOUT)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cudart(monkeypatch):
    made = Cudart()
    monkeypatch.setattr(arena, "PIECE_BYTES", PIECE * STRIDE)
    monkeypatch.setattr("torch.cuda.cudart", lambda: made)
    return made


def locked_bytes(node):
    return sum(pool["locked_bytes"] for pool in node.stats()["pools"])


def until_unlocked(node):
    until(lambda: not locked_bytes(node))


@contextmanager
def locking(path):
    with closing(LockedMemory(path, LAYOUT, CPU)) as locked:
        yield locked


def test_pieces_are_locked_once_when_they_are_used_and_let_go_in_the_end(path, cudart):
    with serving(path) as node, joined(path) as client:
        with locking(path) as locked:
            for frames in ([0, 1], [3, 9], [8]):
                with locked.rows(client.memory, frames) as rows:
                    for frame in frames:
                        begin = rows[frame].data_ptr()
                        assert any(
                            first <= begin < begin + STRIDE <= first + length
                            for first, length in cudart.pieces.items()
                        )
            assert 2 == len(cudart.pieces)
            assert 2 * PIECE * STRIDE == locked_bytes(node)
        assert {} == cudart.pieces
        until_unlocked(node)


def test_a_restarted_node_has_other_memory_which_is_locked_anew(path, cudart):
    with locking(path) as locked:
        with serving(path), joined(path) as client, locked.rows(client.memory, [0]):
            assert 1 == len(cudart.pieces)
        with serving(path), joined(path) as client:
            with locked.rows(client.memory, [5]) as rows:
                rows[5, :3] = 7
                assert [7] * 3 == client.memory.rows[5, :3].tolist(), "it is the new one's"
            assert [rows.data_ptr() + PIECE * STRIDE] == list(cudart.pieces)


def test_memory_is_unlocked_before_the_node_hears_of_the_end(path, cudart, monkeypatch):
    unlock, registered = arena.SharedArena.unlock, []

    def unlocks(some, piece):
        registered.append(len(cudart.pieces))
        unlock(some, piece)

    monkeypatch.setattr(arena.SharedArena, "unlock", unlocks)
    with serving(path) as node, joined(path) as client, locking(path) as locked:
        with locked.rows(client.memory, [0, 9]):
            pass
        locked.close()
        until_unlocked(node)
    assert [0, 0] == registered


def test_memory_is_unlocked_only_when_copies_under_way_have_ended(path, cudart):
    with serving(path) as node, joined(path) as client:
        memory = client.memory
        locked = LockedMemory(path, LAYOUT, CPU)
        with locked.rows(memory, [0]):
            closing_ = threading.Thread(target=locked.close)
            closing_.start()
            closing_.join(0.1)
            assert closing_.is_alive() and cudart.pieces
            assert PIECE * STRIDE == locked_bytes(node)
            with locked.rows(memory, [1]) as rows:  # another thread's copy meanwhile
                assert rows is memory.rows
        closing_.join()
        assert {} == cudart.pieces
        until_unlocked(node)


def test_what_the_system_refuses_is_copied_unlocked_and_told_once(path, monkeypatch, caplog):
    cudart, cleared = Cudart(limit=PIECE * STRIDE), list[str]()
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    monkeypatch.setattr(locked_module, "clear_error", cleared.append)
    with serving(path), joined(path) as client, locking(path) as locked:
        with caplog.at_level(logging.WARNING):
            for frame in range(0, 40, PIECE):
                with locked.rows(client.memory, [frame]) as rows:
                    rows[frame, 0] = 9
                assert 9 == client.memory.rows[frame, 0]
        assert 1 == len(cudart.pieces) == len(cleared) == len(caplog.records)
        assert "limit on locked memory" in caplog.text


def test_a_node_that_refuses_a_piece_keeps_its_frames_unlocked(path, cudart):
    """Of 128 frames 115 may be locked."""
    with serving(path) as node, joined(path) as client, locking(path) as locked:
        with locked.rows(client.memory, range(128)) as rows:
            rows[127, 0] = 5
        assert 5 == client.memory.rows[127, 0]
        assert 112 * STRIDE == locked_bytes(node) == sum(cudart.pieces.values())


def test_a_client_that_the_node_throws_out_may_still_have_locked_pages(path):
    """It lives, and nobody knows when it unlocks them: they are kept until the node ends."""
    with serving(path) as node:
        with joined(path) as client:
            assert client.lock(0)
            with pytest.raises(NodeError, match="not known"):
                client._ask(77, b"")
        with joined(path) as other:
            other.stats()
            assert PIECE * STRIDE == locked_bytes(node)


# The carrier as a whole.

GROUP = KvGroup(0, ("a", "b"), LAYOUT)
IDENTITY = EngineIdentity(CacheScope(weights=b"w"), (GROUP,), num_ranks=1)


def kv_like_vllm(seed=None, num_blocks=12):
    """Two layers of blocks of 4 tokens, K and V of 128 numbers each."""
    random = torch.Generator().manual_seed(seed or 0)
    shape = (2, num_blocks, 4, 128)
    fresh = torch.zeros(shape)
    return {
        name: torch.randn(shape, generator=random) if seed else fresh.clone() for name in ("a", "b")
    }


@contextmanager
def carrying(path, kv, *, locks=False, rank=0):
    carrier = Carrier(IDENTITY, path, rank)
    carrier.start(kv, 12)
    if locks:
        carrier._locked[LAYOUT] = LockedMemory(path, LAYOUT, CPU)
    with closing(carrier):
        yield carrier


def moved(carrier, loads, saves):
    """Blocks that failed."""
    carrier.move(loads, saves)
    waiting = {each.name for each in loads}, {each.name for each in saves}
    failed = set()

    def has_ended():
        nonlocal waiting
        done = carrier.take_loaded()
        failed.update(done.failed_blocks)
        waiting = waiting[0] - done.loaded, waiting[1] - set(carrier.take_saved())
        return not any(waiting)

    until(has_ended)
    return failed


def transfer(ids, *blocks, in_parts=False, in_step=False):
    return Transfer("request", (GroupBlocks(0, (tuple(ids),), blocks),), in_parts, in_step)


def test_a_node_has_opened_its_disk_before_it_is_asked(path, tmp_path, monkeypatch):
    monkeypatch.setattr(carrier_module, "RETRY_S", 0.01)
    with carrying(path, kv_like_vllm()):
        for _ in range(2):  # also after its restart
            with serving(path, **below(tmp_path)) as node:
                until(lambda: node.stats()["pools"])


@pytest.mark.parametrize("locks", [False, True])
def test_what_one_engine_stored_another_loads_with_every_byte_also_after_a_restart(
    path, tmp_path, locks, monkeypatch
):
    monkeypatch.setattr(carrier_module, "PART_BYTES", 2 * IDENTITY.layout.nbytes)
    ids, source, target = prompt(1, 5), kv_like_vllm(3), kv_like_vllm()
    with carrying(path, source, locks=locks) as one:
        with serving(path, **below(tmp_path)) as node, carrying(path, target, locks=locks) as other:
            assert set() == moved(one, [], [transfer(ids, 3, 7, 1, 0, 11)])
            assert set() == moved(other, [transfer(ids, 2, 3, 4, 9, 5)], [])
            for name in source:
                assert torch.equal(
                    source[name][:, [3, 7, 1, 0, 11]], target[name][:, [2, 3, 4, 9, 5]]
                )
            assert bool(locked_bytes(node)) == locks
            lost = {2, 3, 4, 9, 5}
            assert lost == moved(other, [transfer(prompt(2, 5), 2, 3, 4, 9, 5)], [])
        with serving(path, **below(tmp_path)):
            kept = {name: tensor.clone() for name, tensor in source.items()}
            parts = transfer(prompt(1, 6), 6, 2, 4, 8, 10, 9, in_parts=True)
            assert {9} == moved(one, [parts], [])
            for key in source:
                assert torch.equal(kept[key][:, [3, 7, 1, 0, 11]], source[key][:, [6, 2, 4, 8, 10]])


def test_what_all_ranks_have_alike_the_first_stores_and_all_load(path):
    """Both tell the end of the store: vLLM waits for all ranks. Else each moves its own part."""
    ids, kvs = prompt(1, 3), (kv_like_vllm(3), kv_like_vllm(4))
    with serving(path), ExitStack() as held:
        ranks = [held.enter_context(carrying(path, kv, rank=n)) for n, kv in enumerate(kvs)]
        client = held.enter_context(joined(path))
        assert set() == moved(ranks[1], [], [transfer(ids, 3, 7, 1)])
        assert [] == client.probe(ids)
        assert set() == moved(ranks[0], [], [transfer(ids, 3, 7, 1)])
        assert 3 == len(client.probe(ids)) == client.stats()["pools"][0]["stored"]
        for rank in ranks:
            assert {9} == moved(rank, [transfer(prompt(1, 4), 2, 5, 8, 9)], [])
        for name in ("a", "b"):
            stored = kvs[0][name][:, [3, 7, 1]]
            assert all(torch.equal(stored, kv[name][:, [2, 5, 8]]) for kv in kvs)
        ids_of_ranks = tuple(prompt(2, 1)), tuple(prompt(3, 1))
        for rank, kv in zip(ranks, kvs, strict=True):
            own = {name: tensor[:, 0].clone() for name, tensor in kv.items()}
            assert set() == moved(rank, [], [Transfer("s", (GroupBlocks(0, ids_of_ranks, (0,)),))])
            assert set() == moved(rank, [Transfer("l", (GroupBlocks(0, ids_of_ranks, (10,)),))], [])
            assert all(torch.equal(own[name], kv[name][:, 10]) for name in own)


def test_a_load_in_a_step_is_there_when_the_step_computes(path):
    """vLLM waits for no word of it, only for the blocks that failed and how long it took."""
    ids, source, target = prompt(1, 3), kv_like_vllm(3), kv_like_vllm()
    with serving(path), carrying(path, source) as one, carrying(path, target) as other:
        assert set() == moved(one, [], [transfer(ids, 3, 7, 1)])
        other.move([transfer(prompt(1, 4), 2, 3, 4, 9, in_step=True)], [])
        for name in source:
            assert torch.equal(source[name][:, [3, 7, 1]], target[name][:, [2, 3, 4]])
        ended = other.take_loaded()
        assert (set(), {9}, ["request"]) == (ended.loaded, ended.failed_blocks, [*ended.load_s])


@pytest.mark.parametrize("fault", ["hangs", "is away", "raises"])
def test_a_step_goes_on_without_a_load_that_a_node_does_not_answer(path, fault, monkeypatch):
    monkeypatch.setattr(carrier_module, "STEP_LOAD_S", 0.05)
    load, kv = transfer(prompt(1, 3), 4, 5, 6, in_step=True), kv_like_vllm(3)
    with ExitStack() as held:
        may_answer = threading.Event()
        if fault == "hangs":
            node = held.enter_context(serving(path))
            answer = node._handle
            node._handle = lambda *asked: may_answer.wait(120) and answer(*asked)
            held.callback(may_answer.set)
        carrier = held.enter_context(carrying(path, kv))
        if fault == "raises":
            monkeypatch.setattr(carrier, "_load_piece", None)
        carrier.move([load], [])
        ended = carrier.take_loaded()
        assert (set(), {4, 5, 6}) == (ended.loaded, ended.failed_blocks)
        may_answer.set()


def test_an_idle_step_waits_until_a_transfer_has_ended(path):
    """No longer than it must: not where nothing is under way, nor for more than was told to."""
    ids, kv = prompt(1, 3), kv_like_vllm(3)
    with serving(path) as node, carrying(path, kv) as carrier:
        carrier.wait(300)
        answer, may_answer = node._handle, threading.Event()

        def late(*asked):
            may_answer.wait(120)
            answer(*asked)

        node._handle = late
        carrier.move([], [transfer(ids, 0, 1, 2)])
        carrier.wait(0.01)
        assert [] == carrier.take_saved()
        may_answer.set()
        carrier.wait(300)
        assert ["request"] == carrier.take_saved()
        carrier.move([transfer(ids, 4, 5, 6)], [])
        carrier.wait(300)
        assert {"request"} == carrier.take_loaded().loaded
        carrier.wait(300)


def test_a_copy_that_fails_is_a_miss_and_the_next_one_is_made(path, monkeypatch):
    ids, kv = prompt(1, 3), kv_like_vllm(3)
    with serving(path) as node, carrying(path, kv) as carrier:
        refused = Mock(side_effect=RuntimeError("invalid argument"))
        with monkeypatch.context() as patch:
            patch.setattr(slabs_module, "_memcpy", refused)
            moved(carrier, [], [transfer(ids, 0, 1, 2)])
            assert 0 == node.stats()["pools"][0]["stored"]
        moved(carrier, [], [transfer(ids, 0, 1, 2)])
        with monkeypatch.context() as patch:
            patch.setattr(slabs_module, "_memcpy", refused)
            assert {4, 5, 6} == moved(carrier, [transfer(ids, 4, 5, 6)], [])
        assert set() == moved(carrier, [transfer(ids, 4, 5, 6)], [])
