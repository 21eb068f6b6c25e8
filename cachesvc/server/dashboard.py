"""Builds the admin half from settings: the parts for the routes under `/admin`.

The composition root creates one per server and runs `keep_history` while it serves. Event loop
only.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from api.admin.login.sessions import Admin, Sessions
from api.admin.parts import AdminParts
from api.cache.explorer import Explorer
from api.cache.owners import Owners
from api.served_model import ServedModel
from cachesvc.config.settings import Settings
from cachesvc.observability.alerts import Alerts
from cachesvc.observability.history import History
from cachesvc.observability.names import HIT_RATE, PROMPT_TOKENS
from cachesvc.observability.snapshot import snapshot
from cachesvc.operator.lookups import read_blocks
from cachesvc.operator.operator import CacheOperator
from cachesvc.server.backend import Backend
from cachesvc.server.money import Money, limit_settings
from cachesvc.server.request_memory import RequestMemory
from cachesvc.server.server_file import new_token, reachable
from cachesvc.server.watch import ServerWatch
from engine.text.outline import Outline

SAMPLE_S = 1.0
SESSION_S = 12 * 3600.0  # maximum age of a login
IDLE_S = 2 * 3600.0  # idle time after which a login ends
RECENT_S = 60.0
FIRST_LINK_S = 24 * 3600.0  # servers are often started long before the first login
RECENT = {
    "requests_per_s": "rate:traffic.requests.*",
    "prompt_tokens_per_s": f"rate:{PROMPT_TOKENS}",
    "hit_ratio": HIT_RATE,
    "generation_tokens_per_s": "rate:traffic.generation_tokens",
    **{
        f"{name}_p{share}_s": f"p{share}:latency.{name}"
        for name in ("ttft", "inter_token", "request")
        for share in (50, 95, 99)
    },
}


class Dashboard:
    def __init__(
        self,
        settings: Settings,
        money: Money,
        core: Backend,
        models: Mapping[str, ServedModel],
        memory: RequestMemory,
        watch: ServerWatch,
        operator: CacheOperator,
    ) -> None:
        self._watch = watch
        self.history = History(self._snapshot, watch.latencies.spreads)
        books, tokenizer = money.books, core.loaded.tokenizer
        alerts = Alerts(settings.server.prometheus_url, watch.readiness, watch.sources.violations)

        def currencies() -> dict[str, str]:
            return {each.tenant: each.currency for each in books.accounts.tenants()}

        self.parts = AdminParts(
            sessions=Sessions(lifetime_s=SESSION_S, idle_s=IDLE_S),
            keys=books.accounts,
            currencies=lambda: list(
                dict.fromkeys(card.currency for card in books.accounts.book.cards[::-1])
            ),
            operator_token=new_token(),
            record=books.accounts.trail.record,
            stats=self.stats,
            history=self.history,
            alerts=alerts.firing,
            books=books,
            journal=memory.records.journal,
            explorer=Explorer(
                core.blocks,
                Owners(models, money.salts, currencies),
                core.disk_view,
                block_bytes=core.layout.nbytes,
            ),
            decode=tokenizer.decode,
            outline=Outline(tokenizer),
            limits=limit_settings(settings.limits),
            blocks=partial(read_blocks, core.blocks),
            cache=operator,
        )

    def stats(self) -> dict[str, Any]:
        """The snapshot and the last minute's figures."""
        recent = self.history.over(list(RECENT.values()), window_s=RECENT_S)
        rates = {name: recent[series] for name, series in RECENT.items()}
        return self._snapshot() | {"recent": {"window_s": RECENT_S} | rates}

    def _snapshot(self) -> dict[str, Any]:
        return snapshot(self._watch.sources, self._watch.metrics.counters())

    def first_link(self, url: str) -> str:
        """A one-time login link for the user who started the server."""
        token = self.parts.sessions.make_link(Admin("operator"), FIRST_LINK_S)
        return f"{reachable(url)}/admin/login?token={token}"

    async def keep_history(self) -> None:
        """Takes a sample each second until cancelled."""
        while True:
            self.history.sample()
            await asyncio.sleep(SAMPLE_S)
