"""Usage and cost as clients read them, all derived from the one billed record."""

from typing import Any

from api.job import Asked, Bill, Served
from billing.gate.outcomes import Outcome
from billing.usage import Usage
from engine.request import Timeline


def wire_usage(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's and DeepSeek's usage fields. hit + miss == prompt; the tiers sum to the hits."""
    tiers = {"device": usage.hit_device, "host": usage.hit_host, "disk": usage.hit_disk}
    if usage.hit_remote:
        tiers["remote"] = usage.hit_remote
    thought = {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_cache_hit_tokens": usage.hit,
        "prompt_cache_miss_tokens": usage.miss,
        "prompt_tokens_details": {"cached_tokens": usage.hit, "cached_tokens_details": tiers},
    } | (thought if reasoning_tokens else {})


def closing(
    served: Served, bill: Bill, asked: Asked, *, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """The closing fields of an answer: `usage` and the optional vendor block."""
    block = vendor_block(served, bill, asked)
    usage = wire_usage(bill.usage, reasoning_tokens)
    return {"usage": usage} | ({"cachesvc": block} if block else {})


def vendor_block(served: Served, bill: Bill, asked: Asked) -> dict[str, Any] | None:
    """The `cachesvc` object of an answer: the requested details, and the reason if it ended
    early."""
    block: dict[str, Any] = {}
    if served.outcome is Outcome.BUDGET:
        block["ended_by"] = "insufficient_balance"
    if asked.details:
        reasons = {str(reason): tokens for reason, tokens in served.miss_reasons.items() if tokens}
        block["miss_reasons"] = reasons
        if served.divergence is not None:
            block["diverged_at_token"] = served.divergence.at_token
            block["diverged_of_tokens"] = served.divergence.of_tokens
            block["diverged_by"] = str(served.divergence.reason)
        if served.replayed_tokens:
            block["replayed_tokens"] = served.replayed_tokens
        if served.dropped_lines:
            block["dropped_lines"] = list(served.dropped_lines)
        if served.jumped_tokens:
            block["jumped_tokens"] = served.jumped_tokens
        block["timings_ms"] = timings_ms(served.timeline, served.usage.output)
        if bill.cost is not None:
            block["cost"] = {
                "currency": bill.currency,
                "amount": bill.cost,
                "saved": bill.saved,
                "price_version": bill.price_version,
            }
    if asked.receipt and bill.receipt is not None:
        block["receipt"] = bill.receipt()
    return block or None


def timings_ms(timeline: Timeline, output_tokens: int) -> dict[str, float | None]:
    """The time of each phase in milliseconds; None for a phase that was not reached."""
    start, admitted, loaded = timeline.arrival_ns, timeline.admitted_ns, timeline.loaded_ns
    first, last = timeline.first_token_ns, timeline.last_token_ns
    per_token = _ms(first, last)
    return {
        "queue": _ms(start, admitted),
        "load": _ms(admitted, loaded),
        "ttft": _ms(start, first),
        "tpot": round(per_token / (output_tokens - 1), 3)
        if per_token is not None and output_tokens > 1
        else None,
        "total": _ms(start, last),
    }


def _ms(begin_ns: int, end_ns: int) -> float | None:
    return round(max(0, end_ns - begin_ns) / 1e6, 3) if begin_ns and end_ns else None
