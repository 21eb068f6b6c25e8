"""What a step of vLLM loads: a node that is slow to answer holds up nobody, and ranks agree."""

import threading
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cachesvc.model_files import UnsupportedKv, weights_digest
from cachesvc.vllm.chains import RequestChains
from cachesvc.vllm.groups import KvGroup
from cachesvc.vllm.identity import EngineIdentity, check_parallel, roots_of
from cachesvc.vllm.planner import Planner
from tiers.blocks.keys import CacheScope
from tiers.node.messages import engine_layout, state_layout
from tiers.tier import TierName
from tiers.transfer.economy import RETRY_EVERY, CostLine

SIZE = 4
LAYOUT = engine_layout(2, 256, SIZE, "float32")
WINDOW = KvGroup(1, ("c",), engine_layout(1, 256, SIZE, "float32"), window=SIZE + 2)
STATE = KvGroup(2, ("d",), state_layout(1, 100, SIZE, "float32"), window=2, is_aligned=True)
WHOLE = KvGroup(0, ("a", "b"), LAYOUT)
SCOPE = CacheScope(weights=b"w", layout=b"l")


class Link:
    """A node that holds `tiers` of whatever it is asked for, once it may answer."""

    def __init__(self, tiers):
        self.tiers = tiers
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = []
        self.fetched = []
        self.held_by = {}
        self.loads = {}

    def probe(self, ids):
        self.asked.append(ids)
        assert self.may_answer.wait(120)
        return list(self.held_by.get(ids[0].scope, self.tiers))[: len(ids)]

    def fetch(self, ids):
        self.fetched.append(ids)

    def close(self):
        pass


@pytest.fixture
def link():
    return Link([TierName.HOST, TierName.DISK, TierName.REMOTE])


@pytest.fixture
def planning():
    """Makes planners of an engine with these groups, over `link` where there is one; closes all."""
    with ExitStack() as made:

        def make(*groups, ranks=1, link=None, **more):
            links = {group.layout: link for group in groups} if link else {}
            identity = EngineIdentity(SCOPE, groups, ranks)
            planner = Planner(identity, links, wait_s=120 if link else 0, **more)
            made.callback(planner.close)
            return planner

        yield make


@pytest.fixture
def planner(planning, link):
    made = planning(WHOLE, link=link)
    made.wait_s = 0
    yield made
    link.may_answer.set()


def request(num_tokens=4 * SIZE, name="a", salt=None):
    ids = {each: list(range(num_tokens)) for each in ("prompt_token_ids", "all_token_ids")}
    counts = dict.fromkeys(("num_tokens", "num_computed_tokens"), num_tokens)
    without = dict.fromkeys(("prompt_embeds", "lora_request", "kv_transfer_params"))
    told = {"cache_salt": salt, "skip_reading_prefix_cache": False, "mm_features": []}
    return SimpleNamespace(request_id=name, **ids, **counts, **without, **told)


def matched(planner, asked, computed=0):
    """The match, asked for until the node has answered."""
    planner.wait_s = 120
    found = planner.match(asked, computed)
    assert found is not None
    return found


def test_vllm_goes_on_while_the_node_looks(planner, link):
    slow, other = request(), request(name="b")
    link.may_answer.clear()
    assert planner.match(slow, 0) is None
    planner.wait_s = 120
    planner.allocated(other, [[1, 2, 3, 4]], 0)
    assert planner.match(slow, 0) is None
    planner.finished(other, [[1, 2, 3, 4]])
    link.may_answer.set()
    found = planner.match(slow, 0)  # nothing else is to do, so it waits
    assert (3 * SIZE, 1) == (found, len(link.asked)), "it is asked once"
    planner.allocated(slow, [[7, 8, 9, 10]], found)
    assert {"host": SIZE, "disk": SIZE, "remote": SIZE} == planner.hits(slow)
    (load,), () = planner.take()
    (piece,) = load.pieces
    assert ((7, 8, 9), 1) == (piece.blocks, len(piece.ids))


@pytest.mark.parametrize(
    ("tiers", "is_below"), [([TierName.HOST], False), ([TierName.HOST, TierName.DISK], True)]
)
def test_what_is_not_in_the_nodes_memory_is_loaded_from_the_lookup_on_and_moved_in_parts(
    planner, link, tiers, is_below
):
    link.tiers = tiers
    found = matched(planner, request())
    assert [len(tiers)] * is_below == [len(ids) for ids in link.fetched]
    planner.allocated(request(), [[7, 8, 9, 10]], found)
    (load,), () = planner.take()
    assert is_below == load.in_parts


def test_an_answer_for_fewer_tokens_than_vllm_has_now_is_not_used(planner, link):
    asked = request()
    link.may_answer.clear()
    assert planner.match(asked, 0) is None
    link.may_answer.set()
    assert 2 * SIZE == matched(planner, asked, SIZE)
    assert [3, 2] == [len(ids) for ids in link.asked]


def test_a_block_is_held_when_every_rank_has_its_part(planning, link):
    planner = planning(WHOLE, ranks=2, link=link)
    ((first, second),) = roots_of(SCOPE.root(), (WHOLE,), 2)
    link.held_by[second] = [TierName.DISK]
    assert SIZE == planner.match(request(), 0)
    assert [first, second] == [ids[0].scope for ids in link.asked]


@pytest.mark.parametrize(
    ("bad", "hits"), [({7}, {}), ({8, 9}, {"host": SIZE}), ({9}, {"host": SIZE, "disk": SIZE})]
)
def test_a_failed_load_is_not_tried_again_for_its_request(planner, link, bad, hits):
    """The node would promise the same blocks again, and vLLM would ask for ever."""
    asked, other = request(), request(name="b")
    planner.allocated(asked, [[7, 8, 9, 10]], matched(planner, asked))
    planner.allocated(other, [[3, 4, 5, 6]], matched(planner, other))
    assert {"a": hits} == planner.fell_short(bad)
    planner.loaded({"a", "b"}, {})
    assert hits == planner.hits(asked), "what vLLM computes is no hit"
    assert 0 == planner.match(asked, 0)
    assert 3 == len(planner.hits(other))
    params = planner.finished(asked, [[7, 8, 9, 10]])
    assert {"cachesvc": {"hit_tokens": hits}} == params
    assert 3 * SIZE == matched(planner, request()), "a later request may try"
    assert {} == planner.fell_short({7, 8, 9})


@pytest.fixture
def stepping(planning, link):
    """A planner of an engine whose loop knows a step's end before it plans the next."""
    link.tiers = [TierName.HOST, TierName.DISK]
    made = planning(WHOLE, link=link, may_load_in_step=True)
    pool_of(made)
    return made


def begin(planner, name, blocks=(7, 8, 9, 10)):
    """Begin a request. Whether its load is in its step."""
    asked = request(name=name)
    found = matched(planner, asked)
    waits = planner.loads_in_step(asked)
    planner.allocated(asked, [blocks], found)
    assert not planner.loads_in_step(asked)
    assert [waits] == [load.in_step for load in planner.take()[0]]
    return waits


def test_a_step_waits_for_no_remote_tier_nor_for_a_slow_one(stepping, link):
    def alone(name, tiers, load_s):
        link.tiers = tiers
        waits = begin(stepping, name)
        stepping.loaded([] if waits else [name], {name: load_s})
        stepping.finished(request(name=name), [[7, 8, 9, 10]])
        return waits

    disk, remote = [TierName.HOST, TierName.DISK], [TierName.DISK, TierName.REMOTE]
    assert alone("a", disk, 10.0)
    assert not alone("b", disk, 1e-6), "whoever asks meanwhile would wait 10 s"
    assert not alone("c", remote, 10.0)
    assert alone("d", disk, 1e-6), "the last one was fast"
    assert alone("e", [TierName.HOST], 1e-6)


@pytest.mark.parametrize(
    ("groups", "may"), [((WHOLE,), False), ((WHOLE, WINDOW), True), ((WINDOW,), True)]
)
def test_a_step_waits_only_where_a_load_that_falls_short_can_be_mended(planning, link, groups, may):
    link.tiers = [TierName.HOST] * 3
    planner = planning(*groups, link=link, may_load_in_step=may)
    asked = request()
    assert matched(planner, asked)
    assert not planner.loads_in_step(asked)


def test_nobody_finds_what_a_step_computed_without_all_of_its_load(stepping):
    """vLLM listed the blocks before they were loaded, and may never compute them."""
    assert begin(stepping, "a")
    stepping.allocated(request(name="b"), [[7, 8, 20, 21]], 0)  # which found two of them listed
    assert {"a": {"host": SIZE}} == stepping.fell_short({8})
    pool = stepping.saves._pool
    assert {7, 8, 9, 10, 20, 21} == pool.evicted
    stepping.loaded((), {"a": 1e-6})
    assert not begin(stepping, "c", [30, 31, 32, 33])
    assert {"c": {}} == stepping.fell_short({30})
    assert {7, 8, 9, 10, 20, 21} == pool.evicted, "what is loaded outside of a step is not listed"


def test_a_request_that_ends_with_the_step_of_its_load_is_stored(stepping):
    assert begin(stepping, "a")
    stepping.finished(request(name="a"), [[7, 8, 9, 10]])
    assert [4] == stored(stepping)
    stepping.loaded((), {"a": 1e-6})
    assert not stepping._loading


def slow_disk(planner, link):
    """A token takes a second to compute, and a byte a second to load from the disk."""
    planner.weigher.economy.compute.observe([(0, 100)], 100.0)
    link.loads = {TierName.DISK: CostLine(0.0, 1.0)}
    link.may_answer.set()


def test_what_loads_slower_than_it_computes_is_neither_promised_nor_fetched(planner, link):
    link.tiers = [TierName.HOST, TierName.DISK, TierName.DISK]
    slow_disk(planner, link)
    asked = request()
    for _ in range(RETRY_EVERY):  # vLLM has no room yet, and asks again
        assert SIZE == matched(planner, asked)
    assert not planner.weigher.tries(), "it was one prompt"
    planner.allocated(asked, [[7, 8, 9, 10]], SIZE)
    ((load,), ()), (piece,) = planner.take(), planner._loading["a"].blocks
    assert ([], False, 7) == (link.fetched, load.in_parts, piece)
    assert ({"host": SIZE}, 2 * SIZE) == (planner.hits(asked), planner.slower(asked))
    told = planner.finished(asked, [[7, 8, 9, 10]])["cachesvc"]
    assert {"hit_tokens": {"host": SIZE}, "miss_tokens": {"slower_than_compute": 2 * SIZE}} == told
    assert 0 == planner.slower(asked)


def test_after_many_refusals_a_block_of_each_tier_is_fetched_that_nobody_waits_for(planner, link):
    link.tiers = [TierName.HOST, TierName.DISK, TierName.DISK, TierName.REMOTE]
    slow_disk(planner, link)
    found = []
    for number in range(RETRY_EVERY + 1):
        asked = request(5 * SIZE, name=str(number))
        found.append(matched(planner, asked))
        planner.allocated(asked, [[7, 8, 9, 10]], found[-1])
        planner.finished(asked, [[7, 8, 9, 10]])
    assert [SIZE] * (RETRY_EVERY + 1) == found
    (disk,), (remote,) = link.fetched  # the last of each
    (ids,) = RequestChains.of(planner.identity, request()).ids(0, 2, 4)
    assert [disk, remote] == list(ids)
    link.loads = {}
    assert 3 * SIZE == matched(planner, request(name="fast"))


def test_a_token_is_weighed_at_its_place(planner, link):
    """The first block costs less than its load, and those behind it more."""
    link.tiers = [TierName.DISK] * 3
    link.may_answer.set()
    for num in (4, 8, 16, 32, 64):
        planner.weigher.economy.compute.observe([(0, num)], num * num / 2)
    link.loads = {TierName.DISK: CostLine(0.0, 25 / LAYOUT.nbytes)}  # 25 s a block
    assert 0 == matched(planner, request())
    assert 2 * SIZE == matched(planner, request(name="b"), SIZE)


def test_a_shorter_load_ends_where_every_group_can_resume(planning):
    """The odd blocks are on the disk, which is slow, and nothing can resume after the first."""
    roots = [root for (root,) in roots_of(SCOPE.root(), (WHOLE, STATE), 1)]
    link = Held(dict(zip(roots, ({0, 1, 2, 3}, {2}), strict=True)))
    planner = planning(WHOLE, STATE, link=link)
    slow_disk(planner, link)
    assert 0 == planner.match(request(), 0)
    link.loads = {}
    assert 3 * SIZE == planner.match(request(name="b"), 0)


def test_ranks_tenants_and_adapters_have_roots_of_their_own():
    identity = EngineIdentity(SCOPE, (WHOLE, WINDOW), 3)
    asked = [*identity.roots_of(request()), *identity.roots_of(request(salt="t"))]
    roots = [root for group in asked for root in group]
    assert len(set(roots)) == 12
    shared = EngineIdentity(SCOPE, (WHOLE, replace(WINDOW, is_shared=True)), 3).roots_of(request())
    assert [roots[:3], roots[3:4]] == shared, "what all ranks have alike is one rank's"
    alone = EngineIdentity(SCOPE, (WHOLE,), 1).roots_of(request())
    assert [roots[:1]] == alone, "the first is it all"


def test_an_adapter_is_what_vllm_last_read_and_without_files_nothing_is_cached(planner, tmp_path):
    def asks(path, number, **more):
        asked = request(name=f"{path} {number}")
        asked.lora_request = SimpleNamespace(lora_path=str(path), lora_int_id=number, **more)
        return asked

    def root(number, **more):
        return planner.identity.roots_of(asks(tmp_path, number, **more))

    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    one = root(1)
    weights.write_bytes(b"another")
    assert one == root(1), "vLLM has it in memory"
    another = root(1, load_inplace=True)
    assert one != another == root(2)
    weights.write_bytes(b"the third")
    assert root(1, load_inplace=True) not in [one, another]
    assert matched(planner, asks(tmp_path, 1))
    elsewhere = asks("name/in-the-hub", 3)
    assert 0 == planner.match(elsewhere, 0)
    planner.allocated(elsewhere, [[1]], 0)
    assert not planner.saves._running


class Held(Link):
    """A node that holds, of each group by its root, the blocks at these places of a prompt."""

    def __init__(self, held):
        super().__init__([])
        self.held = held

    def probe(self, ids):
        tiers = []
        for block in ids:
            place = int.from_bytes(block.tokens[:4], "little") // SIZE
            if place not in self.held[block.scope]:
                break
            tiers.append(TierName.DISK if place % 2 else TierName.HOST)
        return tiers


@pytest.mark.parametrize(
    ("window", "state", "num_blocks"),
    [
        (range(8), range(8), 8),
        ({6, 7}, {7}, 8),
        ({4, 5, 7}, {7, 5, 2}, 6),
        ({4, 5}, {6, 4}, 0),
        ({3, 4}, {6, 4}, 5),
        ({0, 3, 4}, {0, 6}, 1),
        (range(8), (), 0),
    ],
)
def test_a_prefix_ends_where_every_group_can_resume(planning, window, state, num_blocks):
    """A window of five tokens back reaches into two blocks; a state is needed at the very end."""
    groups = (WHOLE, WINDOW, STATE)
    roots = [root for (root,) in roots_of(SCOPE.root(), groups, 1)]
    link = Held(dict(zip(roots, (set(range(8)), set(window), set(state)), strict=True)))
    planner = planning(*groups, link=link)
    asked = request(9 * SIZE)
    assert num_blocks * SIZE == planner.match(asked, 0)
    if num_blocks == 8:
        tables = [list(range(1, 10)), [0] * 6 + [20, 21, 22], [0] * 7 + [30, 31]]
        planner.allocated(asked, tables, 8 * SIZE)
        (load,), () = planner.take()
        assert [(0, tuple(range(1, 9))), (1, (20, 21)), (2, (30,))] == [
            (piece.group, piece.blocks) for piece in load.pieces
        ]
        assert {"a": {}} == planner.fell_short((), ["a"]), "it begins anew"
        assert 0 == planner.match(asked, 0)


class Blocks:
    """vLLM's `BlockPool`: how many use each block."""

    num_gpu_blocks = 100

    def __init__(self):
        self.blocks = range(100)
        self.users = [0] * 100
        self.evicted = set()

    def evict_blocks(self, blocks):
        self.evicted |= blocks

    def touch(self, blocks):
        for block in blocks:
            self.users[block] += 1

    def free_blocks(self, blocks):
        for block in blocks:
            self.users[block] -= 1
            assert self.users[block] >= 0


def pool_of(planner):
    pool = Blocks()
    planner.saves.bind(pool)
    return pool


def step(planner, asked, tables, computed, num_blocks=1, states=()):
    """A step in which vLLM computes so many blocks more of a request, and hands over states."""
    asked.num_computed_tokens = computed * SIZE
    handed = {asked.request_id: [*states]} if states else {}
    state = SimpleNamespace(get_block_ids=lambda name: tables, boundary_state_offloads=handed)
    planner.saves.step(state, {asked.request_id: num_blocks * SIZE})


def test_a_window_and_a_state_are_held_until_every_rank_has_stored_them(planning):
    planner = planning(WHOLE, WINDOW, STATE, ranks=2)
    pool, asked = pool_of(planner), request(6 * SIZE)
    tables = [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16], [0, 0, 0, 24, 25, 0]]
    planner.allocated(asked, tables, 0)
    step(planner, asked, tables, 0, 4, [(2, 24, 4 * SIZE)])
    assert [1, 1, 1, 1, 0] == [pool.users[n] for n in (11, 12, 14, 24, 15)]
    assert ((), ()) == planner.take(), "its step is not done"
    tables[1][:2] = [0, 0]  # vLLM has freed them
    step(planner, asked, tables, 4)
    (), (save,) = planner.take()
    assert [(1, (11, 12, 13, 14)), (2, (24,))] == [(p.group, p.blocks) for p in save.pieces]
    planner.saves.saved({save.name: 1})
    assert 1 == pool.users[11]
    planner.saves.saved({save.name: 1})
    assert [0, 0, 1] == [pool.users[n] for n in (11, 24, 15)]
    asked.num_computed_tokens = 5 * SIZE + 1
    planner.finished(asked, tables)
    (), (last,) = planner.take()
    assert [(0, (1, 2, 3, 4, 5)), (1, (15,))] == [(p.group, p.blocks) for p in last.pieces]
    planner.saves.saved({last.name: 2})
    assert not any(pool.users) and not planner.is_busy


def held_states(planning, num_bytes, *, begins=0):
    """The blocks whose states are held of a prompt of 16, computed in steps of one block, from
    block `begins` on."""
    size = state_layout(1, num_bytes // 4, SIZE, "float32")
    group = KvGroup(1, ("d",), size, window=2, is_aligned=True)
    planner = planning(WHOLE, group)
    pool, asked = pool_of(planner), request(16 * SIZE)
    planner.allocated(asked, [[], []], 0)
    for block in range(begins, 16):
        step(planner, asked, [list(range(1, block + 2)), [0] * block + [50 + block]], block)
    return [block for block in range(16) if pool.users[50 + block]]


def test_states_are_held_at_distances_that_double_until_they_weigh_as_much_as_other_kv(planning):
    block_bytes = WHOLE.layout.nbytes
    assert [0, 1, 3, 7, 15] == held_states(planning, 16 * block_bytes)
    assert [0, 1, 3, 7, 11, 15] == held_states(planning, 4 * block_bytes)
    assert [*range(16)] == held_states(planning, block_bytes)
    assert [11, 15] == held_states(planning, 4 * block_bytes, begins=8), "it began with a state"


def ended(planner, name, blocks):
    asked = request(len(blocks) * SIZE, name)
    planner.allocated(asked, [blocks], 0)
    planner.finished(asked, [blocks])


def stored(planner):
    """How many blocks each planned store has."""
    return [sum(len(piece.blocks) for piece in save.pieces) for save in planner.saves.take()]


def test_a_node_that_hangs_keeps_half_of_vllms_blocks_or_one_request(planning):
    planner = planning(WHOLE)
    pool = pool_of(planner)
    ended(planner, "long", range(1, 91))
    assert [90] == stored(planner), "nothing else waits"
    ended(planner, "more", range(91, 100))
    assert [] == stored(planner)
    planner.saves.saved({"long 1": 1})
    assert not any(pool.users)
    ended(planner, "a", [*range(1, 31)])
    ended(planner, "b", [*range(1, 31), *range(31, 41)])
    ended(planner, "c", [*range(1, 21), *range(50, 70)])
    assert [30, 40, 30] == stored(planner), "shared blocks wait once, and 50 do in all"
    planner.saves.saved({"a 2": 1, "b 3": 1})
    ended(planner, "d", [*range(70, 90)])
    assert [20] == stored(planner)
    planner.saves.saved({"c 4": 1, "d 5": 1})
    assert not any(pool.users) and not planner.is_busy


def test_windows_that_wait_for_their_stores_count_as_held(planning):
    planner = planning(WHOLE, WINDOW)
    pool, asked = pool_of(planner), request(60 * SIZE)
    tables = [list(range(1, 61)), [*range(40, 100)]]
    planner.allocated(asked, tables, 0)
    for tens in range(6):
        step(planner, asked, tables, 10 * tens, 10)
    assert 25 == sum(pool.users), "a quarter of vLLM's blocks"
    for save in planner.saves.take():
        planner.saves.saved({save.name: 1})
    step(planner, asked, tables, 50, 10)
    assert 0 == sum(pool.users)


def test_blocks_of_a_request_that_is_preempted_are_given_up(planning):
    planner = planning(WHOLE, WINDOW)
    pool, asked = pool_of(planner), request(6 * SIZE)
    tables = [[1, 2], [11, 12]]
    planner.allocated(asked, tables, 0)
    step(planner, asked, tables, 0, 2)
    assert 1 == pool.users[12]
    planner.allocated(asked, tables, 0)
    assert not any(pool.users)


def test_after_a_reset_nothing_from_before_is_a_hit_and_nothing_begun_before_is_stored(
    planning, link
):
    """vLLM's weights may be others than its files' from then on, as in reinforcement learning."""
    planner = planning(WHOLE, WINDOW, link=link)
    pool, running, slow = pool_of(planner), request(), request(name="slow")
    planner.allocated(running, [[1, 2], [11, 12]], 0)
    step(planner, running, [[1, 2], [11, 12]], 0, 2)
    link.may_answer.clear()
    planner.wait_s = 0
    assert planner.match(slow, 0) is None
    planner.renew()
    link.may_answer.set()
    planner.finished(running, [[1, 2], [11, 12]])
    assert ((), ()) == planner.take() and not any(pool.users)
    before = {ids[0].scope for ids in link.asked}
    assert matched(planner, slow)
    assert before.isdisjoint(ids[0].scope for ids in link.asked[-2:])


@pytest.mark.parametrize(
    "field",
    ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"],
)
def test_ranks_that_share_neither_layers_nor_blocks_are_refused_by_name(field):
    served = {"tensor_parallel_size": 8, "data_parallel_size": 2, field: 1}
    check_parallel(SimpleNamespace(**served))
    with pytest.raises(ValueError, match=f"{field}=2"):
        check_parallel(SimpleNamespace(**served | {field: 2}))


def test_of_several_revisions_in_the_hubs_cache_none_is_guessed(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, text in {"refs/main": "one", "snapshots/one/config.json": "{}"}.items():
        path = tmp_path / "models--o--m" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert weights_digest("o/m", None, is_sole=True) == weights_digest("o/m", None)
    (tmp_path / "models--o--m" / "snapshots" / "two").mkdir()
    with pytest.raises(UnsupportedKv, match="several revisions of o/m"):
        weights_digest("o/m", None, is_sole=True)
