"""The composition root: builds every part from settings, joins them, serves, and shuts down.

    Settings ─► model ─► tiers ─► engine ─┬─► app ─► HTTP server
             └► store ─► accounts ─► ledger ┘

Runs on the main thread, whose event loop is the server's. Shutdown (SIGTERM, SIGINT) lets running
requests finish for `server.drain`, then closes the engine, flushes the tiers and closes the ledger.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import cachesvc
from api.access.fair_pool import encoder_pool
from api.access.overload import QueueBound
from api.app import create_app
from api.collaborators import (
    Access,
    Bookkeeping,
    Collaborators,
    EngineParts,
    Inference,
    WireSettings,
)
from api.requests.bridge import OutputBridge
from api.requests.metering import LedgerMeter, durable
from api.requests.quote import Quotes
from api.requests.retention import Retention
from api.served_model import ServedModel
from cachesvc.config.errors import ConfigError
from cachesvc.config.places import disk_path
from cachesvc.config.settings import Settings
from cachesvc.operator.lookups import CacheSurvey
from cachesvc.operator.operator import CacheOperator
from cachesvc.operator.quotas import QuotaBook
from cachesvc.operator.scopes import note_scopes, payers
from cachesvc.operator.storage_meter import StorageMeter
from cachesvc.server.backend import Backend, MakeBackend
from cachesvc.server.connection import http_config
from cachesvc.server.dashboard import Dashboard
from cachesvc.server.http import HttpServer
from cachesvc.server.listen import listen, url_of
from cachesvc.server.money import Money
from cachesvc.server.request_memory import RequestMemory
from cachesvc.server.served_models import Serving, served_models
from cachesvc.server.server_file import announced
from cachesvc.server.watch import ServerWatch, failure_of
from engine.errors import EngineAway, EngineFailed, ModelError
from engine.request import StepOutput
from tiers.disk.pin_file import load_pins
from tiers.telemetry.events import EventStream

logger = logging.getLogger(__name__)


class Service:
    """Everything of one running server: `start`, `run`, then `close`."""

    def __init__(
        self,
        makers: Sequence[tuple[Settings, MakeBackend]],
        main: int,
        money: Money,
        stream: EventStream,
    ) -> None:
        """`makers` make the engines, each of one model and its settings. The tiers, and all else
        that the server has once, are set by the one at place `main`."""
        settings = makers[main][0]
        self._settings, self._money = settings, money
        self._bridge = OutputBridge()
        self._memory = RequestMemory(settings, money.salts)
        quotas = QuotaBook(settings.cache, settings.server.data_dir)
        with ExitStack() as opened:
            self.servings: list[Serving] = []
            away: dict[int, EngineAway] = {}  # by place
            for place, (one, make_backend) in enumerate(makers):
                shares = quotas.shares if place == main else None
                try:
                    core = make_backend(self._on_outputs, stream, shares)
                except EngineAway as error:
                    away[place] = error
                    core = self._absent(place, makers[place], stream)
                opened.callback(core.close)
                self.servings.append(Serving(core, served_models(core, one.model)))
            if len(away) == len(makers):
                raise away[0]
            opened.pop_all()  # from here on `close` closes them
        for place, why in away.items():
            logger.warning(f"{why}; {self.servings[place].name} is served once it answers")
        self.main = next(self.servings[p] for p in (main, *range(len(makers))) if p not in away)
        self.core = core = self.main.core
        known = [each for each in self._models.values() if not each.is_absent]
        note_scopes(settings.server.data_dir, known)
        quotas.add(money.salts, self.main.models.values())
        core.tell_owners(quotas.owners.names())
        self._watch = ServerWatch(self.main, self.servings, money)
        self.metrics = self._watch.metrics
        self._storage = self._storage_meter()
        self._operator = self._operator_of(core, self._storage)
        self.dashboard = Dashboard(
            settings, money, core, self._models, self._memory, self._watch, self._operator
        )
        self._memory.start()
        self._encoders = encoder_pool()

    def app(self, meter: LedgerMeter) -> Callable[..., Any]:
        money, server = self._money, self._settings.server
        wire = Collaborators(
            access=Access(gatekeeper=money.gatekeeper, salts=money.salts, limits=money.limits),
            inference=Inference(
                engines=[self._engine_parts(place, meter) for place in range(len(self.servings))],
                bridge=self._bridge,
                encoders=self._encoders,
            ),
            books=Bookkeeping(
                meter=meter,
                balances=money.accounts.tenant,
                opened=money.books,
                replays=money.replays,
            ),
            records=self._memory.records,
            settings=WireSettings(
                max_body_bytes=server.max_body_bytes, cors_origins=server.cors_origins
            ),
            readiness=self._watch.readiness,
            render_metrics=self.metrics.render,
            observe_http=self.metrics.observe_http,
        )
        self._app = create_app(wire, admin=self.dashboard.parts, version=cachesvc.__version__)
        return self._app

    def start(self) -> None:
        """Starts the ledger, the app and the engine, whose first steps warm it up."""
        self._config = http_config(
            self.app(self._money.start(self.metrics.observe_bill)),
            loop="uvloop",
            lifespan="on",
            timeout_graceful_shutdown=max(1, round(self._settings.server.drain)),
        )
        for each in self.servings:
            each.core.start(self._settings.engine.chunk_tokens)

    def run(self, listener: socket.socket, on_ready: Callable[[str, str], None]) -> None:
        """Serves on `listener` until a signal comes. Call after `start`. Raises ConfigError if
        another server has its port, EngineFailed if the engine has ended."""
        listen(listener)
        server, config, url = self._settings.server, self._config, url_of(listener)
        http = HttpServer(
            config, lambda: on_ready(url, self.dashboard.first_link(url)), self._begin_drain
        )
        with (
            announced(server.data_dir, url, self.dashboard.parts.operator_token),
            asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
        ):
            runner.run(self._serve(http, listener))
        if (failure := failure_of(self.servings)) is not None:
            raise EngineFailed(
                f"the engine has failed, and the server ends so that it can be started again: "
                f"{failure!r}"
            ) from failure

    def close(self) -> None:
        """Stops the engine and flushes the tiers. The ledger's owner closes the ledger."""
        self._watch.closing = True
        started, cache = time.monotonic(), self.core.engine.stats().cache
        unsaved = sum(each.core.close() for each in self.servings)
        self._encoders.close()
        self._memory.close()
        if cache.disk is None:
            unsaved += cache.device.num_blocks + cache.host.num_blocks
            logger.info(f"stopped; without a disk tier, {unsaved} blocks lost")
            return
        elapsed_s = time.monotonic() - started
        logger.info(f"stopped; the tiers were flushed in {elapsed_s:.1f} s, {unsaved} blocks lost")

    @property
    def _models(self) -> Mapping[str, ServedModel]:
        return {name: model for each in self.servings for name, model in each.models.items()}

    def _operator_of(self, core: Backend, storage: StorageMeter | None) -> CacheOperator:
        return CacheOperator(
            core.engine.call,
            core.blocks,
            core.layout.block_size,
            self._settings.server.data_dir,
            self._money.books.signer,
            storage,
            forget=self._memory.forget,
            elsewhere=[each.name for each in self.servings if each.core is not core],
        )

    def _absent(
        self, place: int, maker: tuple[Settings, MakeBackend], stream: EventStream
    ) -> Backend:
        """Takes the place of an engine that does not answer at the start, until it does."""
        from cachesvc.server.relay.core import absent  # with aiohttp

        settings, make_backend = maker

        async def find() -> None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="cachesvc-join")
            making = thread.submit(make_backend, self._on_outputs, stream, None)
            thread.shutdown(wait=False)  # it ends with this
            try:
                core = await durable(making)
                serving = Serving(core, served_models(core, settings.model))
                data_dir = settings.server.data_dir
                await asyncio.to_thread(note_scopes, data_dir, serving.models.values())
            except ConfigError as error:
                raise ModelError(str(error)) from error
            except BaseException:  # nobody will use what was made, or still is
                making.add_done_callback(_close_unused)
                raise
            self.servings[place] = serving
            wire = self._app.state.wire
            engines = list(wire.inference.engines)
            engines[place] = self._engine_parts(place, wire.books.meter)
            inference = replace(wire.inference, engines=engines)
            self._app.state.wire = replace(wire, inference=inference)

        return absent(settings, self._on_outputs, find)

    async def _watch_engine(self, place: int) -> None:
        """Watches an engine elsewhere, or until one comes, and then that."""
        while (watch := getattr(self.servings[place].core, "watch", None)) is not None:
            await watch()

    def _engine_parts(self, place: int, meter: LedgerMeter) -> EngineParts:
        serving, bounds = self.servings[place], self._settings.engine
        core = serving.core
        engine, block_size = core.engine, core.layout.block_size
        operator = self._operator if serving is self.main else self._operator_of(core, None)
        survey = CacheSurvey(core.blocks, block_size) if core.blocks else None
        return EngineParts(
            engine=engine,
            models=serving.models,
            grammars=core.grammars,
            queue=QueueBound(engine, max_wait_s=bounds.max_wait, max_in_flight=bounds.max_waiting),
            retention=Retention(operator),
            quotes=Quotes(engine, meter, survey),
            publish=operator.publish if core.is_shared else None,
            watch=partial(self._watch_engine, place),
        )

    async def _serve(self, http: HttpServer, listener: socket.socket) -> None:
        watch = self._watch
        forever = (watch.blocks(), watch.money(), watch.engine(http), self._storage.run())
        tasks = [asyncio.create_task(each) for each in (*forever, self.dashboard.keep_history())]
        try:
            await http.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()

    def _begin_drain(self) -> None:
        self._watch.closing = True

    def _on_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """Delivers outputs, then counts them. Engine thread."""
        self._bridge.deliver(outputs)
        self.metrics.observe_outputs(outputs)

    def _storage_meter(self) -> StorageMeter:
        """The storage meter, with all recorded pins, including those that expired before this
        start."""
        data_dir, books = self._settings.server.data_dir, self._money.books
        return StorageMeter(
            self.core.engine.call,
            books.ledger,
            lambda: payers(data_dir, [each.tenant for each in books.accounts.tenants()]),
            books.accounts.trail.record,
            pins=load_pins(disk_path(data_dir)),
            clock=lambda: self.core.operations.now_s,
        )


def _close_unused(making: "Future[Backend]") -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()
