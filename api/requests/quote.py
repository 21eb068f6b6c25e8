"""What a request would hit and cost now, without computing it; and requests with limits on that.

A quote is a snapshot: blocks may come or leave before the request does, and the bill follows what
is served. Event loop only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from api.errors import InvalidRequest, QuoteRefused, Unsupported
from api.job import Job, Priced
from api.requests.metering import LedgerMeter
from api.served_model import EngineClient
from api.shapes.schemas import Extension
from billing.errors import InvalidAmount
from billing.keys import Principal
from billing.money import format_units, parse_not_negative
from billing.usage import Usage
from tiers.tier import TierName


class Survey(Protocol):
    """Which tiers hold the blocks of a prompt now."""

    async def __call__(self, job: Job) -> Sequence[Mapping[str, int]]:
        """For each prompt: tokens that would hit, by tier."""
        ...


@dataclass(frozen=True, slots=True)
class Quote:
    """Tokens by class, their price, and the expected wait in the queue in milliseconds."""

    model: str
    usage: Usage
    max_output: int
    priced: Priced
    wait_ms: float

    @property
    def hit_rate(self) -> float:
        return self.usage.hit / self.usage.prompt

    def as_json(self) -> dict[str, Any]:
        usage, priced, ref = self.usage, self.priced, self.priced.ref
        return {
            "object": "cache.quote",
            "model": self.model,
            "prompt_tokens": usage.prompt,
            "hit_tokens": usage.hit,
            "hit_tokens_by_tier": usage.hit_by_tier,
            "miss_tokens": usage.miss,
            "hit_rate": round(self.hit_rate, 4),
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
        )

    async def check(self, principal: Principal, job: Job, extension: Extension) -> None:
        """Raises QuoteRefused if the job would miss the request's own limits on hits or price."""
        if extension.require_hit is None and extension.max_price is None:
            return
        if extension.require_hit is not None and self._survey is None:
            raise Unsupported(
                "What the engine has cached is not known before it answers; leave require_hit out.",
                param="cachesvc.require_hit",
            )
        most = _units(extension.max_price)
        quote = await self.of(principal, job)
        if extension.require_hit is not None and quote.hit_rate < extension.require_hit:
            raise QuoteRefused(
                f"{quote.usage.hit} of {quote.usage.prompt} prompt tokens would hit, "
                f"{quote.hit_rate:.1%}, and cachesvc.require_hit is {extension.require_hit:.1%}; "
                "nothing was computed.",
                quote.as_json(),
                param="cachesvc.require_hit",
            )
        at_most = quote.priced.prompt + quote.priced.output
        if most is not None and at_most > most:
            raise QuoteRefused(
                f"With {quote.max_output} tokens of output it may cost {format_units(at_most)} "
                f"{quote.priced.currency}, more than cachesvc.max_price; nothing was computed. "
                "Lower max_tokens, or raise the price.",
                quote.as_json(),
                param="cachesvc.max_price",
            )


def _units(price: str | None) -> int | None:
    try:
        return None if price is None else parse_not_negative(price)
    except InvalidAmount as error:
        raise InvalidRequest(f"{error}.", param="cachesvc.max_price") from None
