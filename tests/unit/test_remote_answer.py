"""A request as an engine elsewhere answers it: counts by tier, lookups, reasons."""

from typing import Any

import pytest

from api.journal.why import ReasonKind, why
from cachesvc.vllm.reports import RequestReport
from engine.remote.answer import RunningAnswer
from engine.remote.protocol import Told, finish_of
from engine.request import BlockRun, FinishReason, Request, SamplingParams, TokenCounts
from tests.support.requests import request as asked
from tiers.blocks.keys import CacheScope, prefix_keys, token_bytes
from tiers.errors import MissReason
from tiers.tier import TierName

SIZE = 16


def request(num_tokens: int, *, n: int = 1, **more: Any) -> Request:
    scope, params = CacheScope(weights=b"w", tenant=b"t"), SamplingParams(n=n)
    return asked(range(num_tokens), params=params, scope=scope, arrival_ns=5, **more)


def admitted(num_tokens: int, report: RequestReport | None, num_cached: int) -> RunningAnswer:
    answer = RunningAnswer(request(num_tokens), SIZE, now_ns=10)
    answer.begin(report, now_ns=20)
    answer.count({TierName.DEVICE: num_cached})
    return answer


def test_hits_by_tier_are_the_reports_and_the_device_has_the_rest():
    report = RequestReport(local=32, hits={"host": 48, "disk": 16}, admitted_ns=12)
    output = admitted(130, report, 96).output(0, 20, Told((7,)))
    counts = TokenCounts(prompt=130, hit_device=32, hit_host=48, hit_disk=16, output=1)
    assert (counts, 34) == (output.counts, output.counts.miss)
    when = output.timeline
    assert (5, 12, 20) == (when.arrival_ns, when.admitted_ns, when.first_token_ns)


def test_without_a_report_all_that_was_cached_was_on_the_device():
    counts = admitted(64, None, 40).output(0, 20, Told((7,))).counts
    assert (40, 0, 24) == (counts.hit_device, counts.hit_host, counts.miss)


def test_what_was_not_loaded_because_computing_was_faster_is_a_miss_that_says_so():
    stop = MissReason.SLOWER_THAN_COMPUTE
    report = RequestReport(local=16, hits={"host": 16}, stop=stop, admitted_ns=1)
    output = admitted(70, report, 32).output(0, 20, Told((7,)))
    assert {stop: 32, MissReason.TAIL: 6} == output.miss_reasons
    assert stop is output.lookup.stop
    assert ReasonKind.REFUSED is why(output.lookup, 0.0).kind


def test_a_hit_stays_one_where_nobody_tells_that_it_was_not_delivered():
    """The connector's report of it is lost."""
    answer = admitted(64, RequestReport(hits={"host": 48}, admitted_ns=1), 16)
    counts = answer.output(0, 20, Told()).counts
    assert (0, 48, 16) == (counts.hit_device, counts.hit_host, counts.miss)


@pytest.mark.parametrize("num_cached", [16, 64])
def test_what_was_computed_after_a_failed_load_is_no_hit(num_cached):
    """If a part was loaded, vLLM counts all that it asked for as cached."""
    report = RequestReport(local=16, hits={"host": 16}, admitted_ns=1)
    counts = admitted(100, report, num_cached).output(0, 20, Told()).counts
    found = counts.hit_device, counts.hit_host, counts.hit_remote, counts.miss
    assert (16, 16, 0, 68) == found


def test_the_lookup_has_a_run_for_each_tier_and_ends_with_what_was_computed():
    answer = admitted(100, RequestReport(local=16, hits={"host": 32}, admitted_ns=1), 48)
    first, second = answer.output(0, 20, Told((7,))), answer.output(0, 21, Told((8,)))
    keys = prefix_keys(answer.request.scope.root(), token_bytes(range(100)), SIZE)
    assert (
        BlockRun(TierName.DEVICE, 0, 16, 1, keys[0]),
        BlockRun(TierName.HOST, 16, 32, 2, keys[2]),
        BlockRun(None, 48, 52, 4),
    ) == first.lookup.runs
    assert keys[3] == first.lookup.absence.key
    assert second.lookup is None


def test_until_the_engine_tells_all_counts_as_computed_and_no_reason_is_told():
    answer = RunningAnswer(request(64), SIZE, now_ns=1)
    answer.begin(None, now_ns=2)
    first = answer.output(0, 3, Told((7,)))
    assert (64, 0) == (first.counts.prompt, first.counts.hit)
    assert (None, {}) == (first.lookup, first.miss_reasons)
    answer.count({TierName.DEVICE: 48})
    last = answer.output(0, 4, Told((8,), finish=FinishReason.STOP))
    assert (48, {MissReason.TAIL: 16}) == (last.counts.hit, last.miss_reasons)
    assert last.lookup is not None


def test_what_is_never_told_stays_a_miss_that_nobody_reported():
    answer = RunningAnswer(request(64), SIZE, now_ns=1)
    answer.begin(None, now_ns=2)
    last = answer.output(0, 3, Told((7,), finish=FinishReason.ABORT))
    assert (64, {MissReason.UNREPORTED: 64}) == (last.counts.miss, last.miss_reasons)
    assert last.lookup is not None and last.lookup.stop is MissReason.UNREPORTED


def test_a_request_without_the_cache_says_so():
    answer = RunningAnswer(request(64, cache=False), SIZE, now_ns=1)
    answer.begin(None, now_ns=2)
    answer.count(None)
    output = answer.output(0, 3, Told())
    assert {MissReason.DISABLED: 64} == output.miss_reasons
    assert MissReason.DISABLED is output.lookup.stop


@pytest.mark.parametrize(
    ("report", "prompt", "hit"),
    [
        (None, 0, 0),  # it never began
        (RequestReport(computed=0), 0, 0),  # it waited until it was ended
        # it was loading
        (RequestReport(local=16, hits={"host": 32}, admitted_ns=3, computed=40), 48, 48),
        (RequestReport(local=16, hits={}, admitted_ns=3, computed=64), 64, 16),
        (RequestReport(local=0, hits={}, admitted_ns=3, computed=900), 100, 0),
    ],
)
def test_a_prompt_that_was_cut_short_counts_what_was_done(report, prompt, hit):
    answer = RunningAnswer(request(100), SIZE, now_ns=1)
    answer.cut_short(report)
    output = answer.output(0, 9, Told(finish=FinishReason.ABORT))
    assert (prompt, hit, True) == (output.counts.prompt, output.counts.hit, output.last)
    assert output.counts.hit + output.counts.miss == output.counts.prompt


def test_a_prompt_that_was_cut_short_in_silence_is_an_unreported_miss():
    answer = RunningAnswer(request(100), SIZE, now_ns=1)
    answer.cut_short(None, unreported=True)
    output = answer.output(0, 9, Told(finish=FinishReason.ABORT))
    assert (100, 0) == (output.counts.prompt, output.counts.hit)
    assert {MissReason.UNREPORTED: 100} == output.miss_reasons


def test_only_the_last_sequence_ends_the_request():
    answer = RunningAnswer(request(20, n=3), SIZE, now_ns=1)
    answer.begin(None, now_ns=2)
    assert not answer.output(1, 3, Told((1,), finish=FinishReason.STOP)).last
    answer.end(2)
    last = answer.output(0, 3, Told((1, 2), finish=FinishReason.LENGTH))
    assert (True, 3) == (last.last, last.counts.output)


def test_finish_reasons_that_we_do_not_share_are_errors():
    assert [None, FinishReason.STOP, FinishReason.ERROR, FinishReason.ERROR] == [
        finish_of(reason) for reason in (None, "stop", "error", "repetition")
    ]
