"""What watches the running server: its readiness, its metrics, and checks of blocks and money.

Event loop only, but for what metrics observe.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from api.collaborators import Readiness
from billing.errors import BillingError
from cachesvc.observability.latency import Latencies
from cachesvc.observability.metrics import Metrics
from cachesvc.observability.snapshot import Sources
from cachesvc.server.http import HttpServer
from cachesvc.server.memory import SpareMemory
from cachesvc.server.money import Money
from cachesvc.server.served_models import Serving, stats_of
from tiers.tier import TierStats

logger = logging.getLogger(__name__)

WATCH_S = 0.5  # interval of checks on the engine
CHECK_S = 60.0  # interval of checks on an idle engine's blocks
MONEY_S = 10.0  # interval of checks on holds and balances
AUDIT_EVERY = 360  # of these checks, one proves the whole ledger


def failure_of(each: Sequence[Serving]) -> BaseException | None:
    """Why an engine has died; None while all live."""
    failures = (serving.core.engine.failure for serving in each)
    return next((failure for failure in failures if failure is not None), None)


class ServerWatch:
    """`sources` is the current state, for metrics and dashboard."""

    def __init__(self, main: Serving, each: Sequence[Serving], money: Money) -> None:
        self._core, self._each, self._money = main.core, each, money
        self._violations = {"blocks": 0, "ledger": 0}
        self._spare_memory = SpareMemory()
        self.closing = False  # no request is taken any more
        self.latencies = Latencies()
        self.sources = Sources(
            engine=partial(stats_of, main, each),
            money=money.stats,
            violations=lambda: self._violations,
            model=main.name,
        )
        self.metrics = Metrics(self.sources, self.latencies)

    def readiness(self) -> Readiness:
        """Requests are served while an engine of any model answers; `models` names those whose do
        not."""
        if self.closing:
            return Readiness(False, "the server is shutting down")
        each = {one.name: one.core.engine.stats() for one in self._each}
        if failed := next((stats.failed for stats in each.values() if stats.failed), None):
            return Readiness(False, f"the engine has failed: {failed}", alive=False)
        away = [name for name, stats in each.items() if stats.are_away]
        away_urls = {
            use.url: "is refused; the log says why" if use.is_refused else "does not answer"
            for stats in each.values()
            for use in stats.engines
            if not use.is_up
        }
        engines = {"engines": away_urls} if away_urls else {}
        if len(away) == len(each):
            return Readiness(False, "no engine of the model answers", engines)
        if refused := self._money.books.ledger.refuses:
            return Readiness(False, refused)
        detail: dict[str, Any] = {
            "running": sum(stats.num_running for stats in each.values()),
            "waiting": sum(stats.num_waiting for stats in each.values()),
        }
        if len(each) > 1:
            detail["models"] = {
                name: "no engine of the model answers" if name in away else "ready" for name in each
            }
        disk = self._core.engine.stats().cache.disk
        limited = {"limited": [disk.limit]} if disk is not None and disk.limit else {}
        return Readiness(True, "", detail | engines | limited | _degraded(disk))

    async def engine(self, http: HttpServer) -> None:
        """Ends the server if an engine has died, so that the supervisor restarts it."""
        while failure_of(self._each) is None:  # noqa: ASYNC110 - its thread knows no loop
            await asyncio.sleep(WATCH_S)
        http.should_exit = True

    async def blocks(self) -> None:
        """While the engine is idle: returns spare memory, checks the invariants of tiers in this
        process, and counts violations."""
        while True:
            await asyncio.sleep(CHECK_S)
            stats = self._core.engine.stats()
            if stats.num_running or stats.num_waiting or stats.num_loading:
                continue
            await asyncio.to_thread(self._spare_memory.give_back)
            if (call := self._core.blocks) is None:
                continue
            try:
                await asyncio.wrap_future(call(lambda cache: cache.check()))
            except AssertionError as error:
                self._violations["blocks"] += 1
                logger.error(f"an invariant of the tiers is broken: {error}")

    async def money(self) -> None:
        """Refreshes the ledger's snapshot, and proves the ledger from time to time."""
        for turn in itertools.count():
            try:
                await asyncio.to_thread(self._money.refresh)
                if turn % AUDIT_EVERY == 0:
                    await asyncio.to_thread(self._money.keep_heads)
                if turn % AUDIT_EVERY == AUDIT_EVERY - 1:
                    self._violations["ledger"] += await asyncio.to_thread(self._money.audit)
            except BillingError as error:
                logger.error(f"a look at the money failed: {error}")
            except Exception:  # the top of this task, which must go on
                logger.exception("a look at the money failed")
            await asyncio.sleep(MONEY_S)


def _degraded(disk: TierStats | None) -> dict[str, object]:
    """The parts that are degraded although requests are served, and shards that lost blocks to
    damage; empty if none."""
    if disk is None:
        return {}
    checking = [shard.name for shard in disk.shards if shard.checking]
    lost = [shard.name for shard in disk.shards if not shard.ready and not shard.checking]
    said = [f"{name} is being checked: it is read, not written" for name in checking]
    said += [f"{name} cannot be used" for name in lost]
    said += [f"{each.name} takes no blocks: {each.failing}" for each in disk.shards if each.failing]
    repaired = [each.repaired for each in disk.shards if each.repaired]
    told: dict[str, object] = {"degraded": said, "repaired": repaired}
    return {name: rows for name, rows in told.items() if rows}
