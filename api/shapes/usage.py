"""Usage and cost as clients read them, all derived from the one billed record."""

from typing import Any

from api.errors import ended_by
from api.job import Asked, Bill, Job, Served
from billing.usage import Usage
from engine.request import Timeline


def wire_usage(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's and DeepSeek's usage fields. hit + miss == prompt; the tiers sum to the hits."""
    thought = {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_cache_hit_tokens": usage.hit,
        "prompt_cache_miss_tokens": usage.miss,
        "prompt_tokens_details": _prompt_details(usage),
    } | (thought if reasoning_tokens else {})


def responses_usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """In the fields of Responses."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": _prompt_details(usage),
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt + usage.output,
    }


def _prompt_details(usage: Usage) -> dict[str, Any]:
    return {
        "cached_tokens": usage.hit,
        "cache_write_tokens": usage.written,
        "cached_tokens_details": hit_classes(usage),
        **write_classes(usage),
    }


def hit_classes(usage: Usage) -> dict[str, int]:
    """The hits by tier, and those within the part that the request marked to keep."""
    marked = {"explicit": usage.explicit_hit} if usage.explicit_hit else {}
    return usage.hit_by_tier | marked


def write_classes(usage: Usage) -> dict[str, dict[str, int]]:
    """The written tokens by class, if the request marked any to keep; else they are all plain."""
    classes = {
        "implicit": usage.cache_write,
        "explicit": usage.explicit_write,
        "explicit_1h": usage.cache_write_1h,
    }
    marked = usage.explicit_write or usage.cache_write_1h
    return {"cache_write_tokens_details": classes} if marked else {}


def tier_answered(job: Job, bill: Bill) -> dict[str, str]:
    """The service tier that was billed, if the request named one."""
    named = job.context.service_tier
    return {"service_tier": bill.service_tier or "default"} if named else {}


def closing(
    served: Served, bill: Bill, asked: Asked, *, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """The closing fields of an answer: `usage` and the optional vendor block."""
    return {"usage": wire_usage(bill.usage, reasoning_tokens)} | vendor_block(served, bill, asked)


def vendor_block(served: Served, bill: Bill, asked: Asked) -> dict[str, Any]:
    """The field `cachesvc` of an answer, if it has something to say: the requested details, and
    the reason if it ended early."""
    block: dict[str, Any] = {}
    if served.refusal is not None:
        block |= ended_by(served.refusal)
    if asked.details:
        block |= found_of(served)
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
    return {"cachesvc": block} if block else {}


def found_of(served: Served) -> dict[str, Any]:
    """Why tokens missed and which were saved, for an answer's details and the log line."""
    reasons = {str(reason): tokens for reason, tokens in served.miss_reasons.items() if tokens}
    saved = {name: getattr(served, name) for name in ("replayed_tokens", "jumped_tokens")}
    found = {"miss_reasons": reasons} | {name: num for name, num in saved.items() if num}
    if served.divergence is None:
        return found
    at, of, by = served.divergence.at_token, served.divergence.of_tokens, served.divergence.reason
    return found | {"diverged_at_token": at, "diverged_of_tokens": of, "diverged_by": str(by)}


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
