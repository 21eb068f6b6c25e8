"""A journal record as JSON, for admin pages and API users alike. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from api.job import Bill, Divergence, DivergenceReason
from api.journal.journal import RequestRecord
from api.journal.why import NOTHING, MissFinding, Why, why
from api.shapes.usage import timings_ms, wire_usage
from billing.money import format_units, rate_per_million
from engine.request import BlockRun, Lookup


def summary(record: RequestRecord) -> dict[str, Any]:
    """The row of a list: tenant, times, tokens and outcome."""
    served, bill = record.served, record.bill
    usage = bill.usage if bill is not None else served.usage if served is not None else None
    names = ("client_id", "project", "key_id", "session")
    return {
        "id": record.request_id,
        **{name: getattr(record, name) or None for name in names},
        "tenant": record.tenant,
        "model": record.model,
        "stream": record.stream,
        "choices": record.num_choices,
        "arrived": moment(record.arrived_s),
        "state": record.state,
        "outcome": served.outcome if served is not None and record.ended_s else None,
        "finish_reasons": [finish and str(finish) for finish in served.finishes] if served else [],
        "delivered": record.delivered,
        "error": asdict(record.failure) if record.failure is not None else None,
        "prompt_tokens": record.prompt_tokens,
        "usage": wire_usage(usage) if usage is not None else None,
        "timings_ms": _timings(record),
        **{name: getattr(bill, name, None) for name in ("cost", "saved", "currency")},
    }


def details(
    record: RequestRecord, findings: Mapping[int, MissFinding] | None = None
) -> dict[str, Any]:
    """A whole record. `findings` are by prompt number, for admins."""
    served = record.served
    lookups = served.lookups if served is not None else ()
    reasons = served.miss_reasons if served is not None else {}
    found = findings or {}
    return summary(record) | {
        "traceparent": record.trace_parent or None,
        "prompts": [
            _prompt(lookup, why(lookup, record.arrived_s, found.get(number, NOTHING)))
            for number, lookup in enumerate(lookups)
        ],
        "miss_reasons": {str(reason): tokens for reason, tokens in reasons.items()},
        "turn": _turn(served.divergence) if served is not None and served.divergence else None,
        "exactness": None
        if record.promise is None
        else {"equal": record.promise.equal, "text": record.promise.text},
        "bill": _bill(record.bill) if record.bill is not None else None,
    }


def moment(seconds: float) -> str:
    """Unix seconds as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _timings(record: RequestRecord) -> dict[str, float | None]:
    """Queue, load, prefill and decode follow each other; `ttft` and `total` count from arrival."""
    served = record.served
    if served is None:
        return {}
    timeline = served.timeline
    spans = timings_ms(timeline, served.usage.output)
    prefill, decode = (
        round((end - begin) / 1e6, 3) if begin and end else None
        for begin, end in (
            (timeline.loaded_ns, timeline.first_token_ns),
            (timeline.first_token_ns, timeline.last_token_ns),
        )
    )
    return spans | {"prefill": prefill, "decode": decode}


def _prompt(lookup: Lookup, reason: Why) -> dict[str, Any]:
    absence = lookup.absence
    return {
        "block_size": lookup.block_size,
        "runs": [_run(run, lookup.block_size) for run in lookup.runs],
        "why": {"kind": reason.kind, "token": reason.token, "text": reason.text},
        "missed_key": absence.key.hex() if absence is not None and absence.key else None,
        "sibling_key": absence.sibling.hex() if absence is not None and absence.sibling else None,
    }


def _turn(divergence: Divergence) -> dict[str, Any]:
    """Where a chat's turn diverges from the tokens of its earlier turn, and why."""
    written = {
        DivergenceReason.TEMPLATE: "the model's chat template writes the old messages differently",
        DivergenceReason.TOKENIZER: "the old answer is not tokenized as it was generated",
    }
    return {
        "at_token": divergence.at_token,
        "of_tokens": divergence.of_tokens,
        "reason": divergence.reason,
        "text": f"This chat's earlier turn left {divergence.of_tokens} tokens, and only the first "
        f"{divergence.at_token} come again: {written[divergence.reason]}.",
    }


def _run(run: BlockRun, block_size: int) -> dict[str, Any]:
    first = run.start // block_size
    return {
        "source": run.source or "computed",
        "first_block": first,
        "last_block": first + run.num_blocks - 1,
        "first_token": run.start,
        "tokens": run.num_tokens,
        "last_key": run.last_key.hex() if run.last_key is not None else None,
    }


def _bill(bill: Bill) -> dict[str, Any]:
    rate = bill.rate
    return {
        "currency": bill.currency,
        "amount": bill.cost,
        "saved": bill.saved,
        **{name: getattr(rate, name, None) for name in ("card", "version", "window")},
        "note": bill.note,
        "lines": [
            {
                "class": line.name,
                "tokens": line.tokens,
                "rate_per_million": rate_per_million(line.per_token),
                "amount": format_units(line.amount),
            }
            for line in bill.lines
        ],
    }
