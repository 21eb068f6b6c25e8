"""The admin half, built from settings: what the routes under `/admin` are handed.

The composition root makes one per server and runs `keep_history` while it serves. Event loop only.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from api.admin.books import Books
from api.admin.login.passwords import Passwords
from api.admin.login.sessions import Admin, Sessions
from api.admin.parts import AdminParts, BlockReader, CacheHands
from api.cache.explorer import Explorer
from api.journal.journal import Journal
from billing.money import parse_amount
from cachesvc.config import CostsSection, Settings
from cachesvc.observability.history import History
from cachesvc.observability.snapshot import Sources, snapshot
from cachesvc.server.money import limit_settings
from cachesvc.server.server_file import new_token, reachable
from tiers.histogram import Spread
from tiers.telemetry.traffic import TrafficReport

logger = logging.getLogger(__name__)

SAMPLE_S = 1.0
RECENT_S = 60.0
FIRST_LINK_S = 24 * 3600.0  # a server is often started long before somebody looks
RECENT = {
    "requests_per_s": "rate:traffic.requests.*",
    "prompt_tokens_per_s": "rate:traffic.prompt_tokens.*",
    "hit_ratio": "ratio:traffic.prompt_tokens.device+traffic.prompt_tokens.host"
    "+traffic.prompt_tokens.disk+traffic.prompt_tokens.remote/traffic.prompt_tokens.*",
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
        books: Books,
        sources: Sources,
        latencies: Callable[[], Mapping[str, Spread]],
        journal: Journal,
        explorer: Explorer,
        decode: Callable[[Sequence[int]], str],
        working_set: Callable[[], Future[TrafficReport]] | None = None,
        blocks: BlockReader | None = None,
        cache: CacheHands | None = None,
    ) -> None:
        admin = settings.admin
        self._sources = sources
        self.history = History(partial(snapshot, sources), latencies)
        self.parts = AdminParts(
            sessions=Sessions(lifetime_s=admin.session, idle_s=admin.idle),
            keys=books.accounts,
            passwords=Passwords(settings.server.data_dir),
            currency=lambda: (
                books.accounts.book.cards[-1].currency if books.accounts.book.cards else ""
            ),
            operator_token=new_token(),
            record=books.accounts.record,
            stats=self.stats,
            history=self.history,
            working_set=working_set,
            books=books,
            journal=journal,
            explorer=explorer,
            decode=decode,
            limits=limit_settings(settings.limits),
            gib_month=_gib_month(settings.costs),
            blocks=blocks,
            cache=cache,
        )

    def stats(self) -> dict[str, Any]:
        """The snapshot, and what the last minute was like."""
        recent = self.history.over(list(RECENT.values()), window_s=RECENT_S)
        told = {name: recent[series] for name, series in RECENT.items()}
        return snapshot(self._sources) | {"recent": {"window_s": RECENT_S} | told}

    def first_link(self, url: str) -> str:
        """Logs in once, for who started the server."""
        token = self.parts.sessions.make_link(Admin("operator"), FIRST_LINK_S)
        return f"{reachable(url)}/admin/login?token={token}"

    async def keep_history(self) -> None:
        """Takes a sample each second until cancelled."""
        while True:
            self.history.sample()
            await asyncio.sleep(SAMPLE_S)


def _gib_month(costs: CostsSection) -> dict[str, int]:
    """Units that a GiB of each tier costs a month, of the tiers with a price."""
    told = {
        "device": costs.device_gib_month,
        "host": costs.host_gib_month,
        "disk": costs.disk_gib_month,
    }
    return {tier: parse_amount(text) for tier, text in told.items() if text}
