"""Operators' hands on a node, from a server over vLLM: what they remove is gone everywhere."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

from cachesvc.server.vllm import node_operations as module
from cachesvc.server.vllm.node_operations import ElsewhereError, NodeOperations
from cachesvc.server.vllm.tiers import OperationsElsewhere
from cachesvc.vllm.identity import rank_roots
from tests.unit.test_node_socket import LAYOUT, ROOT, joined, prompt, serving, write
from tiers.blocks.chain import Chain
from tiers.blocks.keys import BlockId, block_ids
from tiers.node.client import NodeClient
from tiers.policy.retention import PinError
from tiers.tier import TierName


class Vllm:
    """What the operations use of the engine; `forgets` says whether it empties its own cache."""

    def __init__(self) -> None:
        self.running = frozenset({"a", "b"})
        self.forgets = [False, True]
        self.asked = threading.Event()

    def forget(self) -> "Future[bool]":
        done: Future[bool] = Future()
        done.set_result(self.forgets.pop(0))
        self.asked.set()
        return done

    def in_flight(self) -> frozenset[str]:
        return self.running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.sock"


@pytest.fixture
def engine(path: Path, tmp_path: Path) -> Iterator[NodeClient]:
    below = {"disk_dirs": (tmp_path / "disk",), "disk_bytes": 64 << 20}
    with serving(path, **below), joined(path) as client:
        yield client


def operations(path: Path, vllm: Vllm, num_ranks: int = 1) -> NodeOperations:
    return NodeOperations(path, [LAYOUT], num_ranks, forget=vllm.forget, in_flight=vllm.in_flight)


def of_rank(rank: int) -> list[BlockId]:
    """The blocks of `prompt(1)` on a tensor-parallel rank."""
    return block_ids(rank_roots(ROOT, 2)[rank], b"".join(b.tokens for b in prompt(1)), 4)


def test_a_purge_takes_every_ranks_blocks_and_stays_until_requests_have_stored(
    engine: NodeClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STORE_S", 0.0)
    vllm = Vllm()
    for rank in (0, 1):
        write(engine, of_rank(rank))
    with closing(operations(path, vllm, 2)) as hands:
        purged = hands.purge([ROOT]).result(120)
        assert (6, 0, (ROOT,)) == (
            purged.removed[TierName.HOST].num_blocks,
            purged.num_left,
            purged.roots,
        )
        assert not vllm.forgets, "vLLM's own cache is emptied too"
        write(engine, of_rank(1))
        assert [] == engine.probe(of_rank(1)), "a request that ran stores in vain"
        vllm.running = frozenset({"b"})
        write(engine, of_rank(1))
        assert [] == engine.probe(of_rank(1))
        vllm.running = frozenset({"new"})
        give_up = time.monotonic() + 120
        while not engine.probe(of_rank(1)):
            assert time.monotonic() < give_up
            write(engine, of_rank(1))


def test_a_purge_that_vllm_does_not_follow_has_failed(
    engine: NodeClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORGET_S", 0.0)
    with (
        closing(operations(path, Vllm())) as hands,
        pytest.raises(ElsewhereError, match="did not empty its own cache"),
    ):
        hands.purge([ROOT]).result(120)


def test_a_pin_set_through_the_cache_is_the_nodes(engine: NodeClient, path: Path) -> None:
    write(engine, prompt(1))
    with closing(operations(path, Vllm())) as hands:
        cache = OperationsElsewhere(LAYOUT, hands, 0)
        chain = Chain(ROOT, [1] * 13, 4)
        pin = cache.pin("system", chain, cache.now_s + 3600, "a test")
        cache.saved().result(120)
        assert (3, 12, "a test") == (len(pin.keys), pin.num_tokens, pin.why)
        assert ["system"] == [each.name for each in cache.pins()]
        removed = cache.evict([each.key for each in prompt(1)]).result(120)
        assert {TierName.HOST: 0, TierName.DISK: 0} == removed
        assert cache.unpin("system") and not cache.unpin("system")
        with pytest.raises(PinError, match="may be"):
            cache.pin("all", Chain(ROOT, range(12_000), 4), cache.now_s + 3600)


def test_pins_stay_shown_while_the_node_is_away(path: Path) -> None:
    with closing(operations(path, Vllm())) as hands:
        with serving(path), joined(path) as engine:
            write(engine, prompt(1))
            hands.pin("p", ROOT, [each.key for each in prompt(1)], 3600, "", "")
            assert 1 == len(hands.pins())
        assert ["p"] == [each.name for each in hands.pins()]
        with pytest.raises(PinError, match="does not answer"):
            hands.unpin("p")


def test_pins_are_refused_where_each_rank_has_keys_of_its_own(path: Path) -> None:
    with closing(operations(path, Vllm(), 2)) as hands, pytest.raises(PinError, match="tensor"):
        hands.pin("p", ROOT, [], 1, "", "")
