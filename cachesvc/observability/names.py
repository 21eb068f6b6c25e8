"""The name, kind, meaning and labels of every metric, and their aliases. Pure declarations."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from tiers.tier import TierName

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Spec(NamedTuple):
    """A metric's kind, meaning and labels.

    `buckets` are a histogram's upper bounds. A histogram without them comes from a snapshot with
    its own.
    """

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


SPECS: Mapping[str, Spec] = {
    "cachesvc_build_info": Spec(
        "gauge",
        "Always 1; names the running version and the model that the server serves",
        ("version", "model"),
    ),
    "cachesvc_http_requests_total": Spec(
        "counter",
        "HTTP requests, by route and status code; 499 is a client that left before its answer",
        ("route", "code"),
    ),
    "cachesvc_http_request_seconds": Spec(
        "histogram", "From a request's first byte in to its last byte out", ("route",), _LONG
    ),
    "cachesvc_requests_total": Spec(
        "counter", "Requests that left the engine, by how they ended", ("finish",)
    ),
    "cachesvc_prompt_tokens_total": Spec(
        "counter",
        "Prompt tokens, by where their KV came from when the request was admitted; "
        "source=computed are the misses",
        ("source",),
    ),
    "cachesvc_generation_tokens_total": Spec("counter", "Tokens generated"),
    "cachesvc_jumped_tokens_total": Spec(
        "counter", "Generated tokens that a grammar forced: decode steps that were saved"
    ),
    "cachesvc_miss_tokens_total": Spec(
        "counter", "Prompt tokens that were computed, by the reason", ("reason",)
    ),
    "cachesvc_time_to_first_token_seconds": Spec(
        "histogram",
        "From a request's arrival to its first token; hit_class is the slowest tier that "
        "served a part of the prompt, or cold",
        ("hit_class",),
        _LONG,
    ),
    "cachesvc_inter_token_seconds": Spec(
        "histogram", "Between two tokens of one sequence", (), _FAST
    ),
    "cachesvc_queue_seconds": Spec("histogram", "From arrival to admission", (), _LONG),
    "cachesvc_load_seconds": Spec(
        "histogram", "From admission until the matched prefix is on the device", (), _FAST
    ),
    "cachesvc_prefill_seconds": Spec(
        "histogram", "From the prefix being on the device to the first token", (), _LONG
    ),
    "cachesvc_request_seconds": Spec(
        "histogram", "From arrival to the last token", (), (*_LONG, 300.0)
    ),
    "cachesvc_running_requests": Spec("gauge", "Sequences that prefill or decode now"),
    "cachesvc_waiting_requests": Spec("gauge", "Sequences in the waiting queue"),
    "cachesvc_loading_requests": Spec("gauge", "Sequences whose prefix is being promoted"),
    "cachesvc_preemptions_total": Spec("counter", "Sequences sent back to the waiting queue"),
    "cachesvc_steps_total": Spec("counter", "Steps of the engine"),
    "cachesvc_prefill_tokens_total": Spec(
        "counter", "Tokens that prefill computed, including those recomputed after a preemption"
    ),
    "cachesvc_cache_blocks": Spec("gauge", "Blocks held", ("tier",)),
    "cachesvc_cache_bytes": Spec(
        "gauge", "Bytes of memory or files in use, which the capacity limits", ("tier",)
    ),
    "cachesvc_cache_logical_bytes": Spec(
        "gauge", "Bytes of KV of the held blocks when loaded", ("tier",)
    ),
    "cachesvc_cache_capacity_bytes": Spec("gauge", "Capacity of the tier at present", ("tier",)),
    "cachesvc_disk_setting_bytes": Spec(
        "gauge",
        "Capacity of the disk tier as set; more than at present if its file system lacks room",
    ),
    "cachesvc_cache_events_total": Spec(
        "counter", "What happened to blocks in a tier", ("tier", "event")
    ),
    "cachesvc_checkpoints": Spec(
        "gauge", "Checkpoints of recurrent states that a tier holds", ("tier",)
    ),
    "cachesvc_checkpoint_bytes": Spec("gauge", "Bytes of a tier that checkpoints take", ("tier",)),
    "cachesvc_checkpoint_capacity_bytes": Spec(
        "gauge", "Bytes of a tier that checkpoints may take", ("tier",)
    ),
    "cachesvc_pins": Spec("gauge", "Prefixes that operators pinned"),
    "cachesvc_pinned_bytes": Spec("gauge", "Bytes of KV that are pinned, in any tier"),
    "cachesvc_pinnable_bytes": Spec("gauge", "Bytes of KV that can be pinned"),
    "cachesvc_quota_used_bytes": Spec(
        "gauge",
        "Bytes of a tier by the tenant or sharing group with a quota; common is all others",
        ("tier", "group"),
    ),
    "cachesvc_quota_share_bytes": Spec(
        "gauge", "Bytes of a tier that other groups cannot evict", ("tier", "group")
    ),
    "cachesvc_evictions_total": Spec(
        "counter",
        "Blocks that left a tier: for room, a quota, their age, on request, as redundant, or by "
        "a fault",
        ("tier", "cause"),
    ),
    "cachesvc_block_lifetime_seconds": Spec(
        "histogram", "From a block's arrival in a tier until it leaves", ("tier",)
    ),
    "cachesvc_block_idle_seconds": Spec(
        "histogram", "From a block's last use until it leaves a tier", ("tier",)
    ),
    "cachesvc_block_reuse_gap_seconds": Spec(
        "histogram", "From one use of a block to the next, by the tier that served it", ("tier",)
    ),
    "cachesvc_tier_served_blocks_total": Spec("counter", "Blocks a tier served", ("tier",)),
    "cachesvc_tier_missed_blocks_total": Spec(
        "counter", "Blocks requested from a tier that it did not serve", ("tier",)
    ),
    "cachesvc_tier_faults_total": Spec(
        "counter", "Blocks a tier could not serve or store because of a fault", ("tier", "reason")
    ),
    "cachesvc_transfer_bytes_total": Spec(
        "counter", "Bytes of KV moved between tiers, as stored in the slower one", ("from", "to")
    ),
    "cachesvc_transfer_seconds": Spec(
        "histogram", "Each copy or disk job between tiers, of one block or several", ("from", "to")
    ),
    "cachesvc_disk_map_bytes": Spec("gauge", "Maximum size of a shard's file", ("shard",)),
    "cachesvc_disk_map_used_bytes": Spec(
        "gauge", "Bytes in used pages of a shard's map", ("shard",)
    ),
    "cachesvc_disk_shards": Spec(
        "gauge", "Shards of the disk tier: ready, read while checked, or unusable", ("state",)
    ),
    "cachesvc_load_bytes_per_second": Spec(
        "gauge", "Rate at which one reader loads from disk, smoothed"
    ),
    "cachesvc_prefill_tokens_per_second": Spec("gauge", "Rate of prefill, smoothed"),
    "cachesvc_loads_refused_total": Spec(
        "counter", "Loads not done because computing was expected to be faster"
    ),
    "cachesvc_collisions_total": Spec(
        "counter", "Equal keys whose scope, parent or tokens differed; each was a miss"
    ),
    "cachesvc_event_listeners": Spec("gauge", "Listeners to the stream of block events"),
    "cachesvc_events_missed_total": Spec(
        "counter", "Block events dropped for listeners that read too slowly"
    ),
    "cachesvc_billed_units_total": Spec(
        "counter", "Charged, in 1e-12 of the currency unit, by token class", ("class", "currency")
    ),
    "cachesvc_saved_units_total": Spec(
        "counter", "Savings of hits over misses, in 1e-12 of the currency unit", ("currency",)
    ),
    "cachesvc_holds": Spec("gauge", "Open holds"),
    "cachesvc_hold_age_seconds": Spec("gauge", "Age of the oldest open hold"),
    "cachesvc_ledger_drift_units": Spec(
        "gauge", "Balances minus the sum of ledger entries, in 1e-12 units; anything but 0 is a bug"
    ),
    "cachesvc_ledger_commands_total": Spec(
        "counter",
        "Holds, their top-ups, settlements and deposits that the ledger processed; outcome is "
        "done or refused",
        ("outcome",),
    ),
    "cachesvc_ledger_settled_total": Spec("counter", "Requests charged"),
    "cachesvc_ledger_reaped_total": Spec(
        "counter",
        "Holds that ended without their request: lapsed with their lease, or crashed with an "
        "earlier run",
        ("reason",),
    ),
    "cachesvc_ledger_commits_total": Spec("counter", "Transactions of the ledger"),
    "cachesvc_ledger_failed_commits_total": Spec(
        "counter", "Transactions of the ledger that failed; all their commands were refused"
    ),
    "cachesvc_ledger_commit_seconds_total": Spec("counter", "Time spent in these transactions"),
    "cachesvc_ledger_commit_seconds_max": Spec("gauge", "The longest of them since the start"),
    "cachesvc_ledger_queue": Spec("gauge", "Commands waiting for the ledger"),
    "cachesvc_ledger_clock_skew_seconds": Spec(
        "gauge", "Difference of the host's clock from the right time; beyond 120 no hold is taken"
    ),
    "cachesvc_tenant_balance": Spec(
        "gauge", "A tenant's balance, in its currency", ("tenant", "currency")
    ),
    "cachesvc_tenant_charged_total": Spec(
        "counter", "What this server charged a tenant since its start", ("tenant", "currency")
    ),
    "cachesvc_tenant_charged": Spec(
        "gauge",
        "What a tenant was charged in the current day or month (UTC) by all servers of the ledger",
        ("tenant", "currency", "period"),
    ),
    "cachesvc_invariant_violations_total": Spec(
        "counter", "Invariants found broken while running; anything but 0 is a bug", ("invariant",)
    ),
}


class Alias(NamedTuple):
    """A metric under another name, summed over all labels except `by`, which is renamed.

    `where` keeps the samples whose label has one of the values. `per` divides by another metric.
    """

    metric: str
    by: tuple[str, str] | None = None  # (our label, its name there)
    where: tuple[str, frozenset[str]] | None = None
    per: str | None = None


HITS = frozenset(map(str, TierName))  # sources other than computation

VLLM_ALIASES: Mapping[str, Alias] = {
    "vllm:num_requests_running": Alias("cachesvc_running_requests"),
    "vllm:num_requests_waiting": Alias("cachesvc_waiting_requests"),
    "vllm:kv_cache_usage_perc": Alias(
        "cachesvc_cache_bytes",
        where=("tier", frozenset({"device"})),
        per="cachesvc_cache_capacity_bytes",
    ),
    "vllm:prefix_cache_queries": Alias("cachesvc_prompt_tokens_total"),
    "vllm:prefix_cache_hits": Alias("cachesvc_prompt_tokens_total", where=("source", HITS)),
    "vllm:prompt_tokens": Alias("cachesvc_prompt_tokens_total"),
    "vllm:generation_tokens": Alias("cachesvc_generation_tokens_total"),
    "vllm:request_success": Alias("cachesvc_requests_total", by=("finish", "finished_reason")),
    "vllm:num_preemptions": Alias("cachesvc_preemptions_total"),
    "vllm:time_to_first_token_seconds": Alias("cachesvc_time_to_first_token_seconds"),
    "vllm:inter_token_latency_seconds": Alias("cachesvc_inter_token_seconds"),
    "vllm:e2e_request_latency_seconds": Alias("cachesvc_request_seconds"),
    "vllm:request_queue_time_seconds": Alias("cachesvc_queue_seconds"),
    "vllm:request_prefill_time_seconds": Alias("cachesvc_prefill_seconds"),
}

# Series of the history: prompt tokens, those that hit in any tier, and the hit rate.
PROMPT_TOKENS = "traffic.prompt_tokens.*"
HIT_TOKENS = "+".join(f"traffic.prompt_tokens.{tier}" for tier in TierName)
HIT_RATE = f"ratio:{HIT_TOKENS}/{PROMPT_TOKENS}"

ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/cache/events",
        "/health",
        "/health/ready",
        "/metrics",
        "/tokenize",
        "/user/balance",
    }
)
