"""What a step of vLLM loads: a node that is slow to answer holds up nobody, and ranks agree."""

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cachesvc.vllm.identity import EngineIdentity, rank_roots
from cachesvc.vllm.planner import Planner
from tiers.blocks.keys import BlockId, CacheScope
from tiers.node.messages import engine_layout
from tiers.tier import TierName

SIZE = 4
LAYOUT = engine_layout(2, 256, SIZE, "float32")
SCOPE = CacheScope(weights=b"w", layout=b"l")


class Link:
    """A node that holds `tiers` of whatever it is asked for, once it may answer."""

    def __init__(self, tiers: Sequence[TierName]) -> None:
        self.tiers = tiers
        self.may_answer = threading.Event()
        self.answered = threading.Event()
        self.asked: list[Sequence[BlockId]] = []
        self.held_by: dict[bytes, Sequence[TierName]] = {}

    def probe(self, ids: Sequence[BlockId]) -> list[TierName]:
        self.asked.append(ids)
        assert self.may_answer.wait(120)
        self.answered.set()
        return list(self.held_by.get(ids[0].scope, self.tiers))[: len(ids)]

    def close(self) -> None:
        self.may_answer.set()


@pytest.fixture
def link() -> Link:
    return Link([TierName.HOST, TierName.DISK, TierName.REMOTE])


@pytest.fixture
def planner(link: Link) -> Iterator[Planner]:
    made = Planner(EngineIdentity(SCOPE, LAYOUT, 1), link, wait_s=0)  # type: ignore[arg-type]
    yield made
    link.close()
    made.close()


def request(num_tokens: int = 4 * SIZE, name: str = "a", salt: str | None = None) -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=list(range(num_tokens)),
        all_token_ids=list(range(num_tokens)),
        num_tokens=num_tokens,
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
        cache_salt=salt,
        lora_request=None,
        mm_features=[],
        num_computed_tokens=num_tokens,
        kv_transfer_params=None,
    )


def matched(planner: Planner, asked: Any, computed: int = 0) -> int:
    """The match, asked for until the node has answered."""
    planner.wait_s = 120
    found = planner.match(asked, computed)
    assert found is not None
    return found


def test_vllm_goes_on_while_the_node_looks(planner: Planner, link: Link) -> None:
    slow = request()
    assert planner.match(slow, 0) is None
    assert planner.match(slow, 0) is None
    link.may_answer.set()
    assert link.answered.wait(120)
    while (found := planner.match(slow, 0)) is None:
        pass
    assert (3 * SIZE, 1) == (found, len(link.asked)), "it is asked once"
    planner.allocated(slow, [7, 8, 9, 10], found)
    assert {"host": SIZE, "disk": SIZE, "remote": SIZE} == planner.hits(slow)
    (load,), () = planner.take()
    assert ((7, 8, 9), 1) == (load.blocks, len(load.ids))


def test_an_answer_for_fewer_tokens_than_vllm_has_now_is_not_used(
    planner: Planner, link: Link
) -> None:
    asked = request()
    assert planner.match(asked, 0) is None
    link.may_answer.set()
    assert 2 * SIZE == matched(planner, asked, SIZE)
    assert [3, 2] == [len(ids) for ids in link.asked]


def test_a_request_that_ends_before_the_answer_leaves_nothing(planner: Planner, link: Link) -> None:
    asked = request()
    assert planner.match(asked, 0) is None
    planner.finished(asked, [])
    assert not planner._asked
    link.may_answer.set()


def test_a_block_is_held_when_every_rank_has_its_part(link: Link) -> None:
    link.may_answer.set()
    planner = Planner(EngineIdentity(SCOPE, LAYOUT, 2), link, wait_s=120)  # type: ignore[arg-type]
    first, second = rank_roots(SCOPE.root(), 2)
    link.held_by[second] = [TierName.DISK]
    assert SIZE == planner.match(request(), 0)
    assert [first, second] == [ids[0].scope for ids in link.asked]
    planner.close()


@pytest.mark.parametrize(
    ("bad", "hits"),
    [({7}, {}), ({8, 9}, {"host": SIZE}), ({9}, {"host": SIZE, "disk": SIZE})],
)
def test_a_failed_load_is_not_tried_again_for_its_request(
    planner: Planner, link: Link, bad: set[int], hits: dict[str, int]
) -> None:
    """The node would promise the same blocks again, and vLLM would ask for ever."""
    link.may_answer.set()
    asked, other = request(), request(name="b")
    planner.allocated(asked, [7, 8, 9, 10], matched(planner, asked))
    planner.allocated(other, [3, 4, 5, 6], matched(planner, other))
    assert {"a": hits} == planner.fell_short(bad)
    planner.moved({"a", "b"}, set())
    assert hits == planner.hits(asked), "what vLLM computes is no hit"
    assert 0 == planner.match(asked, 0)
    assert 3 == len(planner.hits(other))
    _, params = planner.finished(asked, [7, 8, 9, 10])
    assert {"cachesvc": {"hit_tokens": hits}} == params
    assert 3 * SIZE == matched(planner, request()), "a later request may try"
    assert {} == planner.fell_short({7, 8, 9})


def test_ranks_tenants_and_adapters_have_roots_of_their_own() -> None:
    identity = EngineIdentity(SCOPE, LAYOUT, 3)
    roots = [*identity.roots_of(request()), *identity.roots_of(request(salt="t"))]
    assert len(set(roots)) == 6
    assert roots[:1] == EngineIdentity(SCOPE, LAYOUT, 1).roots_of(request()), "the first is it all"
