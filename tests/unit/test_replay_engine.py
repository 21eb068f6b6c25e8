"""The replay: traces as files, prefix semantics, tiers over one another, agreement with independent
models, and `cachesvc replay` as users run it."""

import gzip
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import zstandard

from tests.live_server import SCRIPT
from tests.support.commands import said, told
from tests.support.workloads import agents, chat, documents, make_trace, scan
from tests.terminal import on_a_terminal
from tiers.errors import ConfigurationError
from tiers.policy.admission import WritePolicy
from tiers.replay.replay import ReplayResult, TierPlan, replay
from tiers.replay.trace import Trace, TraceError, TraceRequest, read_trace

REAL = Path(__file__).parents[3] / "shared/traces/mooncake_conversation.jsonl.gz"
MIXED = make_trace(
    "mixed", [chat(0.5), agents(0.03), scan(0.3), documents(0.5)], duration_s=450.0, seed=11
)


def trace_of(*chains: list[int], block_tokens: int = 10) -> Trace:
    """One request a second; every block is full."""
    requests = [
        TraceRequest(float(number), len(chain) * block_tokens, tuple(chain))
        for number, chain in enumerate(chains)
    ]
    return Trace("made", requests, block_tokens)


def run(trace: Trace, *capacities: int, **settings) -> ReplayResult:
    names = ("device", "host", "disk")
    plans = [TierPlan(name, size) for name, size in zip(names, capacities, strict=False)]
    return replay(trace, plans, **settings)


def test_a_block_counts_only_when_all_before_it_hit():
    """3 and 4 are resident, but 9 before them is not."""
    result = run(trace_of([1, 2, 3, 4], [1, 9, 3, 4]), 100)
    assert result.hit_tokens == 10


def test_a_partial_last_block_counts_its_tokens():
    requests = [TraceRequest(0.0, 13, (1, 2)), TraceRequest(1.0, 13, (1, 2))]
    result = run(Trace("made", requests, 10), 100)
    assert (result.hit_tokens, result.tokens) == (13, 26)


def test_a_repeated_id_and_an_empty_prompt_are_survived():
    """Traces of other makers have both."""
    assert run(trace_of([1, 1, 2], [], [1, 1, 2]), 100).hit_tokens == 30


def simple_lru(trace: Trace, capacity: int) -> int:
    """An independent model: an ordered dict, chains used tail first."""
    held: OrderedDict[object, None] = OrderedDict()
    hit_tokens = 0
    for request in trace.requests:
        num_hit = 0
        for block in request.blocks:
            if block not in held:
                break
            num_hit += 1
        hit_tokens += min(num_hit * trace.block_tokens, request.input_tokens)
        for block in reversed(request.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hit_tokens


@pytest.mark.parametrize("capacity", [1, 50, 400, 3000])
def test_lru_agrees_with_an_ordered_dict(capacity):
    assert run(MIXED, capacity).hit_tokens == simple_lru(MIXED, capacity)


@pytest.mark.parametrize("keeps", [True, False, None])
@pytest.mark.parametrize("write_policy", WritePolicy)
def test_tiers_count_every_token_once(keeps, write_policy):
    """Hits by tier sum to the hits, and more tiers never hit less than the first alone."""
    result = run(MIXED, 40, 300, 2000, keeps=keeps, write_policy=write_policy)
    assert sum(tier.hit_tokens for tier in result.tiers) == result.hit_tokens
    assert result.tiers[0].hit_tokens == run(MIXED, 40).hit_tokens
    for tier in result.tiers:
        assert 0 <= tier.written_blocks - tier.evicted_blocks <= tier.capacity_blocks


def test_move_serves_what_one_large_lru_serves():
    """LRU tiers that move blocks hold as many different ones as one LRU of their summed size."""
    moved = run(MIXED, 40, 300, 2000, keeps=False)
    assert moved.hit_tokens == run(MIXED, 2340).hit_tokens


def test_keep_writes_less_and_move_hits_more():
    """The trade, where the tiers are of a size; the rule moves there and keeps elsewhere."""
    sizes = (600, 800, 1200)
    keep, move, rule = (run(MIXED, *sizes, keeps=keeps) for keeps in (True, False, None))
    assert keep.hit_tokens < move.hit_tokens
    assert keep.tiers[1].written_blocks < move.tiers[1].written_blocks
    assert rule.tiers == move.tiers
    steep = (20, 300, 4000)
    keep, rule = (run(MIXED, *steep, keeps=keeps) for keeps in (True, None))
    assert rule.tiers == keep.tiers


def test_demoting_a_promoted_block_again_is_free():
    """a goes down, up and down again with room to spare below: one write."""
    for keeps in (True, False):
        result = run(trace_of([1], [2], [1], [2]), 1, 10, keeps=keeps)
        assert result.tiers[1].written_blocks == 2
        assert result.hit_tokens == 20


def test_second_hit_writes_nothing_of_a_scan():
    once = make_trace("scan", [scan(1.0)], duration_s=300.0, seed=1)
    on_evict = run(once, 50, 1000)
    second = run(once, 50, 1000, write_policy=WritePolicy.ON_SECOND_HIT)
    assert on_evict.tiers[1].written_blocks > 1000
    assert second.tiers[1].written_blocks == 0


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ConfigurationError, match="at least one tier"):
        replay(MIXED, [])


@pytest.mark.skipif(not REAL.exists(), reason="the public trace is not beside the checkout")
def test_the_public_trace_gives_the_published_rates():
    """Token hit rates of an independent simulator: one tier, and three tiers that move."""
    trace = read_trace(REAL)
    for capacity, rate in ((1828, 0.0535), (9140, 0.1996)):
        assert run(trace, capacity).hit_rate == pytest.approx(rate, abs=1e-4)
    tiers = run(trace, 1828, 16451, 164511, keeps=False).tiers
    rates = [tier.hit_tokens / trace.input_tokens for tier in tiers]
    assert rates == pytest.approx([0.0535, 0.2309, 0.0892], abs=1e-4)


CHAINS = [[0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 3, 5], [6, 7, 8], [0, 1, 2, 4, 9]]
TIERS = ("--tiers", "device=2,host=30%,disk=90%")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 1000 * i, "input_length": 512 * len(chain), "hash_ids": chain}
        for i, chain in enumerate(CHAINS)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def shown(*words, **how):
    return said("replay", *words, env={"COLUMNS": "200"}, **how)


def test_json_has_a_result_for_each_capacity_and_the_table_is_for_people(trace):
    found = told("replay", trace, "--capacity-blocks", "5,100%")
    assert [each["capacity_blocks"] for each in found] == [5, 10]
    unlimited = found[1]
    assert unlimited["tokens"] == 512 * 20
    assert unlimited["hit_tokens"] == 512 * 10
    assert unlimited["hit_rate"] == 0.5
    table = shown(trace, "--capacity-blocks", "10")
    for text in ("6 requests", "10,240 tokens", "0.5000", "of all"):
        assert text in table


def test_tiers_show_hits_and_writes_of_each(trace):
    (one,) = told("replay", trace, *TIERS)
    assert [tier["name"] for tier in one["tiers"]] == ["device", "host", "disk"]
    assert sum(tier["hit_tokens"] for tier in one["tiers"]) == one["hit_tokens"] == 5120
    written = one["tiers"][2]["written_blocks"]
    assert [written > 0, str(written)] == [True, shown(trace, *TIERS).split()[-1]]


def test_no_figure_is_cut_piped_or_in_a_narrow_window(trace, tmp_path):
    piped = said("replay", trace, *TIERS)
    for text in ("0.5000", "device", "host", "disk", "written to disk"):
        assert text in piped
    command = ["env", "COLUMNS=50", str(SCRIPT), "replay", trace, *TIERS]
    with on_a_terminal(command, tmp_path) as terminal:
        terminal.read_to_end()
        text = "\n".join(terminal.lines)
    assert "0.5000" in text
    assert "…" not in piped + text
    assert 50 >= max(len(line) for line in terminal.lines if "0.5000" in line)
    assert "not shown here, but in a wider window and with --json: of all" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity-blocks", "0"], "'0' is neither a number of blocks"),
        (["--capacity-blocks", "5,"], "'' is neither a number of blocks"),
        (["--capacity-blocks", "nan%"], "'nan%' is neither"),
        (["--tiers", "device"], "is not NAME=SIZE"),
        (["--tiers", "a=5"], "the tiers are device, host, disk"),
        (["--block-tokens", "2000"], "give the trace's own block size"),
    ],
)
def test_bad_input_is_told_what_was_wrong(trace, arguments, message):
    assert message in shown(trace, *arguments, code=2)
    assert "No such file" in shown("/no/such/trace.jsonl", code=2)


LINE = {"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [5, 6, 7]}
TEXT = (json.dumps(LINE) + "\n\n").encode()


@pytest.mark.parametrize(
    ("name", "data"), [("t.jsonl", TEXT), ("t.jsonl.gz", gzip.compress(TEXT, mtime=0))]
)
def test_plain_and_gzip_read_alike(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    trace = read_trace(path)
    assert list(trace.requests) == [TraceRequest(3.0, 1030, (5, 6, 7), 7, None)]
    assert (trace.input_tokens, trace.working_set_blocks()) == (1030, 3)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("cut.gz", gzip.compress(TEXT * 50, mtime=0)[:-20], "cannot read the trace"),
        ("not.gz", b"plain", "cannot read the trace"),
        ("bad.gz", gzip.compress(TEXT, mtime=0)[:12] + b"\xff" * 40, "cannot read the trace"),
        ("t.jsonl.zst", zstandard.compress(TEXT), "cannot read the trace"),
        ("bytes.jsonl", b"\xff\xfe", "cannot read the trace"),
        ("empty.jsonl", b"\n", "holds no request"),
        ("text.jsonl", TEXT + b"hello", "line 3: not JSON"),
        ("list.jsonl", b"[1]", "line 1: each line must be a JSON object"),
        ("short.jsonl", b'{"timestamp": 1, "input_length": 5}', "hash_ids must be a list"),
        ("minus.jsonl", TEXT.replace(b"1030", b"-1"), "input_length must be a number"),
        ("clock.jsonl", TEXT.replace(b"3000", b'"x"'), "timestamp must be a number"),
        ("nan.jsonl", TEXT.replace(b"3000", b"NaN"), "timestamp must be a number"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path, name, data, message):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TraceError, match=message) as refused:
        read_trace(path)
    assert name in str(refused.value)
