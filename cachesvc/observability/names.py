"""vLLM's names of metrics, the routes that metrics know, and series of the history."""

from collections.abc import Mapping
from typing import NamedTuple

from tiers.tier import TierName


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
        "/health",
        "/health/ready",
        "/metrics",
        "/tokenize",
        "/user/balance",
    }
)
