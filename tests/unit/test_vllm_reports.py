"""Reports from vLLM's engine core to the server: what arrives, and what is lost without harm."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from cachesvc.vllm.groups import KvGroup
from cachesvc.vllm.identity import EngineIdentity
from cachesvc.vllm.reports import Reporter, Reports
from tiers.blocks.keys import CacheScope
from tiers.errors import MissReason
from tiers.node.messages import engine_layout


@pytest.fixture
def ends(tmp_path):
    reports = Reports(tmp_path / "reports.sock")
    reporter = Reporter(reports.path)
    yield reporter, reports
    reporter.close()
    reports.close()


def request(name: str = "r:0", *, computed: int = 0, ours: bool = True) -> Any:
    return SimpleNamespace(
        request_id=f"{name}-1234",
        kv_transfer_params={"cachesvc": {"id": name}} if ours else None,
        num_computed_tokens=computed,
        num_in_flight_tokens=0,
        num_prompt_tokens=100,
    )


def test_hits_and_progress_of_a_request_are_told(ends):
    reporter, reports = ends
    reports.expect("r:0")
    reporter.looked(request(), 16)
    reporter.admitted(request(), {"host": 32}, MissReason.SLOWER_THAN_COMPUTE)
    reports.take()
    report = reports.of("r:0")
    assert (16, {"host": 32}, None) == (report.local, report.hits, report.computed)
    assert report.stop is MissReason.SLOWER_THAN_COMPUTE
    assert report.admitted_ns > 0
    reporter.finished(request(computed=130))
    reports.take()
    report = reports.of("r:0")
    assert (16, 32, 100) == (report.local, sum(report.hits.values()), report.computed)


def test_a_load_that_fell_short_is_told(ends):
    reporter, reports = ends
    reports.expect("r:0")
    reporter.looked(request(), 16)
    reporter.admitted(request(), {"host": 32, "remote": 16}, MissReason.SLOWER_THAN_COMPUTE)
    reporter.fell_short({"r:0-1234": {"host": 16}, "of another": {}})
    reports.take()
    report = reports.of("r:0")
    assert report is not None and report.admitted_ns > 0
    assert (16, {"host": 16}) == (report.local, report.hits)
    assert report.stop is MissReason.ABSENT, "what fell short is not what was not asked for"


def test_a_request_that_begins_again_after_its_load_has_what_stands_by_then(ends):
    """Another one has computed the same prefix meanwhile. A later preemption changes nothing."""
    reporter, reports = ends
    reports.expect("r:0")
    reporter.looked(request(), 0)
    reporter.admitted(request(), {"remote": 48})
    reporter.fell_short({"r:0-1234": {}})
    for local in (32, 64):
        reporter.looked(request(), local)
        reporter.admitted(request(), {})
    reports.take()
    report = reports.of("r:0")
    assert report is not None and (32, {}) == (report.local, report.hits)


def test_requests_of_others_are_not_told_and_not_kept(ends):
    reporter, reports = ends
    reporter.looked(request(ours=False), 16)
    reporter.admitted(request(ours=False), {})
    reporter.finished(request(ours=False))
    reporter.looked(request("gone:0"), 16)
    reporter.admitted(request("gone:0"), {})  # its server does not wait for it any more
    reports.take()
    assert reports.of("gone:0") is None


def test_nonsense_is_passed_over(ends):
    _, reports = ends
    for data in (b"", b"{", b"[]", b'{"id": []}', b'{"layouts": [{}]}', b'{"id": "r:0"}', b"\xff"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.sendto(data, str(reports.path))
    reports.expect("r:0")
    reports.take()
    assert reports.of("r:0") is None


def test_the_sender_neither_waits_nor_fails_where_nobody_reads(tmp_path):
    reports = Reports(tmp_path / "reports.sock")
    reporter = Reporter(reports.path)
    for number in range(20_000):  # more than any socket holds
        reporter.finished(request(f"r{number}:0"))
    assert reporter.lost > 0
    reports.close()
    reporter.finished(request())
    reporter.close()


def test_the_engines_blocks_are_told_once_it_knows_them(ends):
    reporter, reports = ends
    layout = engine_layout(2, 64, 16, "float32")
    scope = CacheScope(weights=b"w", layout=b"l")
    groups = (KvGroup(0, ("a",), layout), KvGroup(1, ("b",), layout, window=20))
    reporter.ready(EngineIdentity(scope, groups, 1))
    reports.take()
    assert [(layout, None), (layout, 20)] == [(g.layout, g.window) for g in reports.engine.groups]
    assert (b"w", b"l") == (reports.engine.scope.weights, reports.engine.scope.layout)
