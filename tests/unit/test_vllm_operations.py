"""Operators' hands on a node, from a server over vLLM: what they remove is gone everywhere."""

import threading
from contextlib import closing

import pytest

from cachesvc.server.vllm import node_operations as module
from cachesvc.server.vllm.node_operations import NodeOperations
from cachesvc.vllm.groups import KvGroup
from cachesvc.vllm.identity import roots_of
from tests.patience import until
from tests.unit.test_node_socket import LAYOUT, ROOT, below, joined, prompt, serving, write
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import block_ids, token_bytes
from tiers.errors import PurgeFailed
from tiers.node.client import NodeClient
from tiers.node.messages import state_layout
from tiers.policy.retention import PinError
from tiers.tier import TierName

WHOLE = KvGroup(0, (), LAYOUT)


class Vllm:
    """What the operations use of the engine; `forgets` says whether it empties its own cache."""

    def __init__(self):
        self.running = frozenset({"a", "b"})
        self.forgets = [False, True]
        self.asked = threading.Event()

    def forget(self):
        self.asked.set()
        return self.forgets.pop(0)

    def in_flight(self):
        return self.running


@pytest.fixture
def engine(path, tmp_path):
    with serving(path, **below(tmp_path)), joined(path) as client:
        yield client


def operations(path, vllm, num_ranks=1, groups=(WHOLE,)):
    return NodeOperations(path, groups, num_ranks, forget=vllm.forget, in_flight=vllm.in_flight)


def of_rank(rank):
    """The blocks of `prompt(1)` on a tensor-parallel rank."""
    return block_ids(roots_of(ROOT, (WHOLE,), 2)[0][rank], b"".join(b.tokens for b in prompt(1)), 4)


def test_a_purge_takes_every_ranks_blocks_and_stays_until_requests_have_stored(
    engine, path, monkeypatch
):
    monkeypatch.setattr(module, "STORE_S", 0.0)
    vllm = Vllm()
    for rank in (0, 1):
        write(engine, of_rank(rank))
    with closing(operations(path, vllm, 2)) as hands:
        purged = hands.purge([ROOT]).result(120)
        assert 6 == purged.removed[TierName.HOST].num_blocks
        assert (0, (ROOT,)) == (purged.num_left, purged.roots)
        assert not vllm.forgets, "vLLM's own cache is emptied too"
        write(engine, of_rank(1))
        assert [] == engine.probe(of_rank(1)), "a request that ran stores in vain"
        vllm.running = frozenset({"b"})
        write(engine, of_rank(1))
        assert [] == engine.probe(of_rank(1))
        vllm.running = frozenset({"new"})
        until(lambda: write(engine, of_rank(1)) or engine.probe(of_rank(1)))


def test_a_purge_that_vllm_does_not_follow_has_failed(engine, path, monkeypatch):
    monkeypatch.setattr(module, "FORGET_S", 0.0)
    with (
        closing(operations(path, Vllm())) as hands,
        pytest.raises(PurgeFailed, match="did not empty its own cache"),
    ):
        hands.purge([ROOT]).result(120)


def test_a_private_prefix_is_sent_to_nobody(path):
    with closing(operations(path, Vllm())) as cache:
        chain = Chain(ROOT, [1] * 12, 4)
        chain.private = True
        assert 0 == cache.publish(chain).result(0), "no node is asked, and none answers here"


def test_the_node_knows_the_owners_of_scopes_as_soon_as_they_are_told(path):
    with (
        serving(path, quotas={"tenant:a": 1 << 18}),
        joined(path) as engine,
        closing(operations(path, Vllm())) as hands,
    ):
        hands.start()
        write(engine, prompt(1))
        hands.tell_owners({ROOT: "tenant:a"})
        (held,) = (each for each in engine.stats()["groups"] if each["group"] == "tenant:a")
        assert held["used_bytes"] > 0


def test_pins_stay_shown_while_the_node_is_away(path):
    with closing(operations(path, Vllm())) as hands:
        with serving(path), joined(path) as engine:
            write(engine, prompt(1))
            hands.pin("p", Chain(ROOT, [1] * 12, 4), hands.now_s + 3600)
            assert 1 == len(hands.pins())
        assert ["p"] == [each.name for each in hands.pins()]
        with pytest.raises(PinError, match="does not answer"):
            hands.unpin("p")


GROUPS = (
    KvGroup(0, (), LAYOUT),
    KvGroup(1, (), LAYOUT, window=6, is_shared=True),
    KvGroup(2, (), state_layout(1, 100, 4, "float32"), window=2),
)
TOKENS = [1] * 21  # five blocks and a tail


class Parts:
    """Blocks of `TOKENS` in a node, by group and rank."""

    def __init__(self, path, num_ranks):
        self.clients = {g.layout: NodeClient(path, g.layout) for g in GROUPS}
        for client in self.clients.values():
            client.connect()
        self.num_ranks = num_ranks

    def runs(self):
        for number, group in enumerate(GROUPS):
            for root in roots_of(ROOT, GROUPS, self.num_ranks)[number]:
                ids = block_ids(root, token_bytes(TOKENS), 4)
                yield number, self.clients[group.layout], ids

    def write(self):
        for _, client, ids in self.runs():
            write(client, ids)

    def evict(self):
        for _, client, ids in self.runs():
            client.operate("evict", keys=[block.key.hex() for block in ids])

    def held(self):
        """For each group and rank, the places of the blocks that the node has."""
        return [
            (number, [place for place, block in enumerate(ids) if client.probe([block])])
            for number, client, ids in self.runs()
        ]

    def close(self):
        for client in self.clients.values():
            client.close()


@pytest.fixture(params=[1, 2])
def parts(request, engine, path):
    with closing(Parts(path, request.param)) as made:
        yield made


def test_a_pin_keeps_what_every_group_and_rank_needs_to_resume(parts, path):
    parts.write()
    with closing(operations(path, Vllm(), parts.num_ranks, GROUPS)) as cache:
        chain = Chain(ROOT, TOKENS, 4)
        pin = cache.pin("system", chain, cache.now_s + 3600, "a test")
        assert (chain.keys, 20) == (list(pin.keys), pin.num_tokens)
        cache.saved().result(120)
        parts.evict()
        needed = {0: [0, 1, 2, 3, 4], 1: [3, 4], 2: [4]}
        assert [(number, needed[number]) for number, _, _ in parts.runs()] == parts.held()
        again = cache.pin("system", KeyedPrefix(ROOT, pin.keys), cache.now_s + 7200)
        assert again.until_s > pin.until_s + 3000 and [again] == cache.pins()
        assert cache.unpin("system") and not cache.unpin("system")
        parts.evict()
        assert not any(places for _, places in parts.held())


def test_a_pin_that_one_layout_refuses_leaves_all_as_they_were(parts, path, monkeypatch):
    with closing(operations(path, Vllm(), parts.num_ranks, GROUPS)) as cache:
        first = cache.pin("p", Chain(ROOT, TOKENS, 4), cache.now_s + 3600, "first")
        ask = NodeClient.operate

        def refuse(node, what, **about):
            if what == "pin" and node is cache._nodes[GROUPS[2].layout]:
                return {"refused": "no room", "excess": 1}
            return ask(node, what, **about)

        monkeypatch.setattr(NodeClient, "operate", refuse)
        for name in ("p", "q"):
            with pytest.raises(PinError, match="no room"):
                cache.pin(name, Chain(ROOT, [2] * 21, 4), cache.now_s + 3600)
        monkeypatch.undo()
        (pin,) = cache.pins()
        assert (first.name, first.keys, first.why) == (pin.name, pin.keys, pin.why)
        assert abs(first.until_s - pin.until_s) < 60


def test_a_prefix_of_several_groups_is_pinned_by_its_tokens(parts, path):
    with closing(operations(path, Vllm(), parts.num_ranks, GROUPS)) as cache:
        keys = Chain(ROOT, TOKENS, 4).keys
        with pytest.raises(PinError, match="by its prompt or messages"):
            cache.pin("p", KeyedPrefix(ROOT, keys), cache.now_s + 3600)
