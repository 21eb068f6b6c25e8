"""Builds the admin half from settings: the parts for the routes under `/admin`.

The composition root creates one per server and runs `keep_history` while it serves. Event loop
only.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from api.admin.login.passwords import Passwords
from api.admin.login.sessions import Admin, Sessions
from api.admin.parts import AdminParts, CacheAdmin, MemoryReader
from api.cache.explorer import Explorer
from api.collaborators import Readiness
from api.journal.journal import Journal
from billing.money import parse_amount
from billing.operations.books import OpenBooks
from billing.prices.book import PriceBook
from cachesvc.config.sections import CostsSection
from cachesvc.config.settings import Settings
from cachesvc.observability.alerts import Alerts
from cachesvc.observability.history import History, pack
from cachesvc.observability.names import HIT_RATE, PROMPT_TOKENS
from cachesvc.observability.snapshot import Counters, Sources, snapshot
from cachesvc.server.money import limit_settings
from cachesvc.server.remembered import Remembered
from cachesvc.server.server_file import new_token, reachable
from cachesvc.server.state_file import StateFile
from tiers.histogram import Spread
from tiers.memory.index import BlockIndex
from tiers.telemetry.working_set import TrafficReport

logger = logging.getLogger(__name__)

SAMPLE_S = 1.0
KEEP_SESSIONS_EVERY = 5  # samples; a session ended on purpose is saved at once
KEEP_HISTORY_EVERY = 300
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
    """The parts of a running server's admin routes."""

    def __init__(
        self,
        settings: Settings,
        *,
        books: OpenBooks,
        sources: Sources,
        counters: Callable[[], Counters],
        latencies: Callable[[], Mapping[str, Spread]],
        journal: Journal,
        explorer: Explorer,
        decode: Callable[[Sequence[int]], str],
        outline: Callable[[Sequence[int]], Sequence[tuple[str, int]]],
        working_set: Callable[[], Future[TrafficReport]],
        blocks: MemoryReader,
        cache: CacheAdmin,
        readiness: Callable[[], Readiness],
    ) -> None:
        self._remembered = Remembered(StateFile(None), max_records=0)
        self._snapshot = partial(_snapshot, sources, counters)

        def book() -> PriceBook:
            return books.accounts.book

        self.history = History(self._snapshot, latencies)
        self.parts = AdminParts(
            sessions=Sessions(lifetime_s=SESSION_S, idle_s=IDLE_S),
            keys=books.accounts,
            passwords=Passwords(settings.server.data_dir),
            cost_currency=lambda: settings.costs.currency or book().cards[0].currency,
            currencies=lambda: list(dict.fromkeys(card.currency for card in book().cards[::-1])),
            operator_token=new_token(),
            record=books.accounts.trail.record,
            stats=self.stats,
            history=self.history,
            alerts=Alerts(settings.server.prometheus_url, readiness, sources.violations).firing,
            working_set=working_set,
            books=books,
            journal=journal,
            explorer=explorer,
            decode=decode,
            outline=outline,
            limits=limit_settings(settings.limits),
            gib_month=_gib_month(settings.costs),
            blocks=blocks,
            cache=cache,
        )

    def stats(self) -> dict[str, Any]:
        """The snapshot and the last minute's figures."""
        recent = self.history.over(list(RECENT.values()), window_s=RECENT_S)
        rates = {name: recent[series] for name, series in RECENT.items()}
        return self._snapshot() | {"recent": {"window_s": RECENT_S} | rates}

    def first_link(self, url: str) -> str:
        """A one-time login link for the user who started the server."""
        token = self.parts.sessions.make_link(Admin("operator"), FIRST_LINK_S)
        return f"{reachable(url)}/admin/login?token={token}"

    def remember(self, remembered: Remembered, index: BlockIndex) -> None:
        """Restores the last run's state, without what cannot be read."""
        self._remembered = remembered
        sessions = self.parts.sessions
        for name, restore in (
            ("sessions", lambda body: sessions.restore(body, time.time())),
            ("history", self.history.restore),
            ("hits", index.past_hits.restore),
        ):
            body = remembered.read(name)
            try:
                if body is not None:
                    restore(body)
            except ValueError as error:
                logger.warning(f"the dashboard starts without its {name}: {error}")
        sessions.on_end = self._keep_sessions

    async def keep_history(self) -> None:
        """Takes a sample each second until cancelled, and saves what a restart would lose."""
        for turn in itertools.count(1):
            self.history.sample()
            if turn % KEEP_SESSIONS_EVERY == 0:
                self._keep_sessions()
            if turn % KEEP_HISTORY_EVERY == 0:
                self._remembered.keep("history", await asyncio.to_thread(self._packed))
            await asyncio.sleep(SAMPLE_S)

    def keep_hits(self, packed: bytes) -> None:
        """Hits by prefix, as `BlockIndex.dump_hits` packs them."""
        self._remembered.keep("hits", packed)

    def close(self) -> None:
        """Saves the current state, after the last request."""
        self.history.sample()
        self._keep_sessions()
        self._remembered.keep("history", self._packed())

    def _packed(self) -> bytes:
        return pack(self.history.dump())

    def _keep_sessions(self) -> None:
        self._remembered.keep("sessions", self.parts.sessions.dump(time.time()))


def _snapshot(sources: Sources, counters: Callable[[], Counters]) -> dict[str, Any]:
    return snapshot(sources, counters())


def _gib_month(costs: CostsSection) -> dict[str, int]:
    """Units per GiB and month, of each tier with a price."""
    return {tier: parse_amount(text) for tier, text in costs.gib_month.items() if text}
