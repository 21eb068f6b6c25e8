"""What the metrics say of outputs and snapshots, under which names."""

import pytest

from billing.group_commit import LedgerStats
from cachesvc.observability.latency import NAMES, Latencies
from cachesvc.observability.metrics import Metrics, hit_class
from cachesvc.observability.snapshot import MoneyStats, Sources, TenantMoney, cache_state
from cachesvc.observability.table import METRICS
from engine.request import FinishReason, Lookup, StepOutput, Timeline, TokenCounts
from engine.stats import EngineStats, EngineUse
from tiers.errors import MissReason
from tiers.operations.operations import GroupUse
from tiers.stats import CacheStats
from tiers.telemetry.events import CacheEvent
from tiers.telemetry.lifetimes import Lives
from tiers.telemetry.transfers import TransferCounts
from tiers.tier import Cause, ShardStats, TierName, TierStats

MS = 1_000_000


def stats():
    disk = TierStats(
        TierName.DISK,
        num_blocks=7,
        capacity_bytes=1000,
        setting_bytes=2000,
        read_bytes=30,
        shards=(ShardStats("shard-0", True, 900, 300), ShardStats("shard-1", ready=False)),
        faults={MissReason.CHECKSUM: 2},
    )
    lives = Lives()
    lives.left(Cause.ROOM, lived_s=100, idle_s=40)
    lives.left(Cause.AGE, lived_s=40 * 86_400, idle_s=31 * 86_400)
    lives.reused(2.0, 3)
    transfers = TransferCounts(block_bytes=10)
    transfers.observe(TierName.HOST, TierName.DEVICE, 4, 0.002)
    cache = CacheStats(
        device=TierStats(
            TierName.DEVICE, num_blocks=3, used_bytes=300, capacity_bytes=400, lives=lives.stats()
        ),
        host=TierStats(TierName.HOST, num_blocks=5),
        below=(disk,),
        checkpoints=(TierStats(TierName.DEVICE, num_blocks=2),),
        events={(TierName.DEVICE, CacheEvent.EVICTED): 4},
        transfers=transfers.stats(),
        collisions=1,
        groups=[
            GroupUse(TierName.DEVICE, "tenant:acme", 7, 50),
            GroupUse(TierName.DEVICE, "scope:00aa", 1, 10),
            GroupUse(TierName.DEVICE, "scope:00bb", 2, 10),
            GroupUse(TierName.DEVICE, None, 5, 30),
        ],
    )
    counts = {"num_running": 2, "num_waiting": 1, "num_loading": 0, "num_steps": 9}
    counts |= {"num_preemptions": 6, "prompt_tokens_computed": 100, "jumped_tokens": 3}
    engines = (EngineUse("http://a:1", True, 3, 40, 30, 2),)
    return EngineStats(**counts, cache=cache, engines=engines)


def metrics(latencies=None):
    ledger = LedgerStats(batches=4, commands=9, refused=2, recovered=1, commit_ns=3_000 * MS)
    acme = TenantMoney("acme", "CNY", 7.5, 0.25, 0.5, 2)
    money = MoneyStats(3, 1.5, 0, (acme,), ledger)
    broken = {"free_plus_used": 0}
    sources = Sources(engine=stats, money=lambda: money, violations=lambda: broken, model="tiny")
    return Metrics(sources, latencies or Latencies())


def value(of, name, labels=None):
    return of.registry.get_sample_value(name, dict(labels or {}))


def outputs():
    """A request of 100 prompt tokens, 64 of them from the host, and two tokens of output."""
    counts = TokenCounts(prompt=100, hit_host=64)
    when = Timeline(10 * MS, 20 * MS, 25 * MS, 50 * MS, 50 * MS)
    first = StepOutput(
        "a",
        0,
        (1,),
        counts,
        miss_reasons={MissReason.ABSENT: 35, MissReason.TAIL: 1},
        timeline=when,
    )
    later = Timeline(10 * MS, 20 * MS, 25 * MS, 50 * MS, 80 * MS)
    last = StepOutput("a", 0, (2,), counts, FinishReason.STOP, timeline=later, last=True)
    return [first, last]


def test_a_request_is_counted_by_source_reason_and_class():
    latencies = Latencies()
    seen = metrics(latencies)
    for output in outputs():
        seen.observe_outputs([output])
    assert 64 == value(seen, "cachesvc_prompt_tokens_total", {"source": "host"})
    assert 36 == value(seen, "cachesvc_prompt_tokens_total", {"source": "computed"})
    assert 35 == value(seen, "cachesvc_miss_tokens_total", {"reason": "absent"})
    assert 2 == value(seen, "cachesvc_generation_tokens_total")
    assert 1 == value(seen, "cachesvc_requests_total", {"finish": "stop"})
    host = {"hit_class": "host"}
    assert 0.040 == pytest.approx(value(seen, "cachesvc_time_to_first_token_seconds_sum", host))
    assert 0.030 == pytest.approx(value(seen, "cachesvc_inter_token_seconds_sum"))
    assert 0.010 == pytest.approx(value(seen, "cachesvc_queue_seconds_sum"))
    assert 0.005 == pytest.approx(value(seen, "cachesvc_load_seconds_sum"))
    assert 0.025 == pytest.approx(value(seen, "cachesvc_prefill_seconds_sum"))
    assert 0.070 == pytest.approx(value(seen, "cachesvc_request_seconds_sum"))
    sources = ("device", "host", "disk", "remote", "computed")
    name = "cachesvc_prompt_tokens_total"
    assert 100 == sum(value(seen, name, {"source": each}) or 0 for each in sources)
    assert {} == seen._last_token_ns, "an ended request leaves nothing behind"
    spreads = latencies.spreads()  # the dashboard gets the same spans
    assert dict.fromkeys(NAMES, 1) == {name: each.count for name, each in spreads.items()}
    assert 0.040 == pytest.approx(spreads["ttft"].total)
    assert 0.030 == pytest.approx(spreads["inter_token"].total)
    assert 0.070 == pytest.approx(spreads["request"].total)


def test_a_request_aborted_while_waiting_is_counted_without_a_latency():
    seen = metrics()
    gone = StepOutput("b", 0, (), TokenCounts(prompt=0), FinishReason.ABORT, last=True)
    seen.observe_outputs([gone])
    assert 1 == value(seen, "cachesvc_requests_total", {"finish": "abort"})
    assert 0 == value(seen, "cachesvc_request_seconds_count")


def test_a_prompt_that_was_cut_short_counts_as_far_as_it_is_billed():
    """It has no reasons: they are those of a whole prompt."""
    seen = metrics()
    counts = TokenCounts(prompt=48, hit_host=16)
    lookup = Lookup((), MissReason.ABSENT, 16)
    gone = StepOutput("b", 0, (), counts, FinishReason.ABORT, lookup=lookup, last=True)
    seen.observe_outputs([gone])
    assert 16 == value(seen, "cachesvc_prompt_tokens_total", {"source": "host"})
    assert 32 == value(seen, "cachesvc_prompt_tokens_total", {"source": "computed"})


def test_the_hit_class_is_the_slowest_tier_that_served():
    assert "cold" == hit_class(TokenCounts(prompt=10))
    assert "device" == hit_class(TokenCounts(prompt=10, hit_device=5))
    assert "disk" == hit_class(TokenCounts(prompt=10, hit_device=5, hit_disk=1))


def test_snapshots_become_samples_at_the_scrape():
    seen = metrics()
    assert 7 == value(seen, "cachesvc_cache_blocks", {"tier": "disk"})
    assert 1000 == value(seen, "cachesvc_cache_capacity_bytes", {"tier": "disk"})
    assert 2000 == value(seen, "cachesvc_disk_setting_bytes")
    assert 30 == value(seen, "cachesvc_transfer_bytes_total", {"from": "disk", "to": "host"})
    faults = {"tier": "disk", "reason": "checksum"}
    assert 2 == value(seen, "cachesvc_tier_faults_total", faults)
    torn = {"tier": "disk", "reason": "torn"}
    assert 0 == value(seen, "cachesvc_tier_faults_total", torn), "its first would be no increase"
    assert 0 == value(seen, "cachesvc_cache_events_total", {"tier": "disk", "event": "lost"})
    assert 0 == value(seen, "cachesvc_evictions_total", {"tier": "disk", "cause": "fault"})
    evicted = {"tier": "device", "event": "evicted"}
    assert 4 == value(seen, "cachesvc_cache_events_total", evicted)
    assert 3 == value(seen, "cachesvc_holds")
    assert 7 == value(seen, "cachesvc_ledger_commands_total", {"outcome": "done"})
    assert 2 == value(seen, "cachesvc_ledger_commands_total", {"outcome": "refused"})
    assert 1 == value(seen, "cachesvc_ledger_reaped_total", {"reason": "crashed"})
    assert 3 == value(seen, "cachesvc_ledger_commit_seconds_total")
    violations = {"invariant": "free_plus_used"}
    assert 0 == value(seen, "cachesvc_invariant_violations_total", violations)


def test_lives_of_blocks_are_cumulative_buckets_in_seconds():
    seen = metrics()
    device = {"tier": "device"}
    lifetime = "cachesvc_block_lifetime_seconds"
    assert 0 == value(seen, f"{lifetime}_bucket", {**device, "le": "60.0"})
    assert 1 == value(seen, f"{lifetime}_bucket", {**device, "le": "300.0"})
    assert 2 == value(seen, f"{lifetime}_bucket", {**device, "le": "+Inf"})
    assert 100 + 40 * 86_400 == value(seen, f"{lifetime}_sum", device)
    assert 2 == value(seen, f"{lifetime}_count", device)
    assert 40 + 31 * 86_400 == value(seen, "cachesvc_block_idle_seconds_sum", device)
    assert 3 == value(seen, "cachesvc_block_reuse_gap_seconds_bucket", {**device, "le": "5.0"})
    assert 1 == value(seen, "cachesvc_evictions_total", {**device, "cause": "age"})


def test_copies_and_shards_are_told():
    seen = metrics()
    up = {"from": "host", "to": "device"}
    assert 40 == value(seen, "cachesvc_transfer_bytes_total", up)
    assert 0.002 == value(seen, "cachesvc_transfer_seconds_sum", up)
    assert 900 == value(seen, "cachesvc_disk_map_bytes", {"shard": "shard-0"})
    assert 300 == value(seen, "cachesvc_disk_map_used_bytes", {"shard": "shard-0"})
    assert 1 == value(seen, "cachesvc_disk_shards", {"state": "ready"})
    assert 1 == value(seen, "cachesvc_disk_shards", {"state": "replacing"})


ANSWERS = [f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")]


def test_routes_and_bills_are_counted_in_closed_sets():
    seen = metrics()
    for path in (*ANSWERS, "/v1/models"):
        seen.observe_http(path, 200, 0.1)
    seen.observe_http("/wp-login.php", 404, 0.1)
    seen.observe_http("/admin/cache", 200, 0.1)
    seen.observe_bill("CNY", {"hit_disk": 10, "miss": 0}, saved_units=90)
    requests = "cachesvc_http_requests_total"
    for path in ANSWERS:
        assert 1 == value(seen, requests, {"route": path, "code": "200"})
    assert 1 == value(seen, requests, {"route": "other", "code": "404"})
    assert 1 == value(seen, requests, {"route": "/admin", "code": "200"})
    billed = {"class": "hit_disk", "currency": "CNY"}
    assert 10 == value(seen, "cachesvc_billed_units_total", billed)
    missed = {"class": "miss", "currency": "CNY"}
    assert 0 == value(seen, "cachesvc_billed_units_total", missed), "there before the first charge"
    assert 90 == value(seen, "cachesvc_saved_units_total", {"currency": "CNY"})


def test_scopes_with_the_default_quota_are_one_group():
    text = metrics().render()[0].decode()
    for group, used, share in (("tenant:acme", 7, 50), ("default", 3, 20), ("common", 5, 30)):
        labels = f'{{group="{group}",tier="device"}}'
        assert f"cachesvc_quota_used_bytes{labels} {used}.0" in text
        assert f"cachesvc_quota_share_bytes{labels} {share}.0" in text


def test_every_exposed_name_is_declared_and_every_declared_one_exposed():
    seen = metrics()
    seen.observe_outputs(outputs())
    seen.observe_http("/v1/models", 200, 0.1)
    seen.observe_bill("CNY", {"miss": 1}, 1)
    families = {
        name: line.split()[3]
        for line in seen.render()[0].decode().splitlines()
        if line.startswith("# TYPE ")
        and (name := line.split()[2]).startswith(("cachesvc_", "vllm:"))
    }
    assert {name: row.kind for name, row in METRICS.items()} == families


def test_a_router_made_for_vllm_finds_the_load_under_its_names():
    model, seen = {"model_name": "tiny"}, metrics()
    assert 2 == value(seen, "vllm:num_requests_running", model)
    assert 1 == value(seen, "vllm:num_requests_waiting", model)
    assert 0.75 == value(seen, "vllm:kv_cache_usage_perc", model)


def test_the_dashboards_snapshot_has_each_tier_below_by_its_name():
    tier = {name: TierStats(name=name) for name in TierName}
    below = (tier[TierName.DISK], tier[TierName.REMOTE])
    state = cache_state(CacheStats(tier[TierName.DEVICE], tier[TierName.HOST], below))
    assert ["device", "host", "disk"] == list(state["tiers"])
    assert "remote" == state["remote"]["name"]
    alone = cache_state(CacheStats(tier[TierName.DEVICE], tier[TierName.HOST]))
    assert (["device", "host"], None) == (list(alone["tiers"]), alone["remote"])
    assert {} == alone["checkpoints"]
