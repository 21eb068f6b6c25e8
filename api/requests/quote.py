"""What a request would hit and cost now, without computing it.

A quote is a snapshot: blocks may come or leave before the request does, and the bill follows what
is served. Event loop only.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.job import Job, Priced
from api.requests.metering import LedgerMeter
from api.served_model import EngineClient
from billing.keys import Principal
from billing.money import format_units
from billing.usage import Usage
from tiers.tier import TierName

# For each prompt of a job: tokens that would hit now, by tier.
Survey = Callable[[Job], Awaitable[Sequence[Mapping[str, int]]]]


@dataclass(frozen=True, slots=True)
class Quote:
    """Tokens by class, all of them misses unless `hits_known`, their price, and the wait ahead."""

    model: str
    usage: Usage
    max_output: int
    priced: Priced
    wait_ms: float
    hits_known: bool

    def as_json(self) -> dict[str, Any]:
        usage, priced, ref = self.usage, self.priced, self.priced.ref
        return {
            "object": "cache.quote",
            "model": self.model,
            "prompt_tokens": usage.prompt,
            "hit_tokens": usage.hit,
            "hit_tokens_by_tier": usage.hit_by_tier,
            "miss_tokens": usage.miss,
            "hit_rate": round(usage.hit / usage.prompt, 4),
            "hits_known": self.hits_known,
            "max_output_tokens": self.max_output,
            "price": {
                "currency": priced.currency,
                "prompt": format_units(priced.prompt),
                "output_at_most": format_units(priced.output),
                "at_most": format_units(priced.prompt + priced.output),
                "card": ref.card,
                "version": ref.version,
                "window": ref.window,
            },
            "wait_ms": round(self.wait_ms, 1),
        }


class Quotes:
    """Quotes of one server, from its queue, its tiers and its prices.

    Without a `survey` nobody knows the hits of an engine elsewhere: a quote is then at most.
    """

    def __init__(self, engine: EngineClient, meter: LedgerMeter, survey: Survey | None) -> None:
        self._engine = engine
        self._meter = meter
        self._survey = survey

    async def of(self, principal: Principal, job: Job) -> Quote:
        """The quote of a job. Raises NoPrice if the model has no price."""
        found = await self._survey(job) if job.cache and self._survey is not None else []
        hits = {tier: sum(one.get(tier, 0) for one in found) for tier in TierName}
        miss = job.prompt_tokens - sum(hits.values())
        usage = Usage(**{f"hit_{tier}": tokens for tier, tokens in hits.items()}, miss=miss)
        wait_s = self._engine.predicted_wait_s(principal.tenant, job.prompt_tokens)
        return Quote(
            job.model.name,
            usage,
            job.max_output,
            self._meter.price(principal, job, usage),
            wait_s * 1000,
            self._survey is not None or not job.cache,
        )
