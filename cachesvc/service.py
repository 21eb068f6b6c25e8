"""The composition root: builds every part from settings, joins them, serves, and stops in order.

    Settings ─► model ─► tiers ─► engine ─┬─► app ─► HTTP server
             └► store ─► accounts ─► ledger ┘

Runs on the main thread, whose event loop is the server's. A stop (SIGTERM, SIGINT) lets running
requests finish for `server.drain`, then closes the engine, flushes the tiers, closes the ledger.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvicorn

import cachesvc
from api.admin.router import admin_router
from api.app import create_app
from api.cache.explorer import Explorer
from api.cache.feeds import Feeds
from api.cache.owners import Owners
from api.collaborators import Collaborators, Readiness, ServedModel, WireSettings
from api.journal.journal import Journal, JournalSettings
from api.requests.bridge import OutputBridge
from api.requests.encoders import EncoderPool
from api.requests.metering import Meter
from api.requests.turns import Conversations
from api.shapes.structured import GrammarDesk
from billing.errors import BillingError
from cachesvc.config import ConfigError, JournalSection, ServerSection, Settings, disk_path
from cachesvc.observability.kv_events import published
from cachesvc.observability.latency import Latencies
from cachesvc.observability.metrics import Metrics
from cachesvc.observability.samples import Snapshots
from cachesvc.observability.snapshot import Sources
from cachesvc.observability.tracing import open_tracer
from cachesvc.operator.block_reader import read_blocks
from cachesvc.operator.operator import CacheOperator
from cachesvc.operator.quotas import QuotaBook
from cachesvc.operator.scopes import note_scopes, payers
from cachesvc.operator.storage_meter import StorageMeter
from cachesvc.server import compute as core
from cachesvc.server.connection import BoundedConnection
from cachesvc.server.dashboard import Dashboard
from cachesvc.server.http import Asgi, HttpServer, Timed, bind, is_loopback
from cachesvc.server.money import Money, open_money
from cachesvc.server.server_file import announced
from engine.models.load import LoadedModel
from engine.request import StepOutput
from tiers.cache import TieredCache
from tiers.disk.directory import is_locked, read_holder
from tiers.disk.pin_file import load_pins
from tiers.disk.tier import DiskTier
from tiers.errors import DirectoryLocked
from tiers.telemetry.events import EventStream

logger = logging.getLogger(__name__)

NUM_ENCODERS = 2  # threads that tokenise long texts
CHECK_S = 60.0  # how often an idle engine's blocks are counted
MONEY_S = 10.0  # how often holds and balances are looked at
AUDIT_EVERY = 360  # of these looks is a proof of the whole ledger


def serve(
    settings: Settings,
    *,
    progress: core.Progress | None = None,
    on_ready: Callable[[str, str], None] = lambda url, link: None,
) -> None:
    """Serve until a signal says to stop. Raises what cannot work, before the first request.

    Once it accepts requests, `on_ready` is called with the server's URL and a link that logs in to
    its dashboard once.
    """
    server = settings.server
    make_data_dir(server.data_dir)
    with contextlib.closing(open_money(settings)) as money:
        check_address(server, requires_keys=money.requires_keys)
        stream = EventStream()
        with (
            contextlib.closing(bind(server.host, server.port)) as listener,
            published(settings.events, stream, settings.cache.block_size),
        ):
            loaded = core.load(settings.model, server.data_dir, progress)
            service = Service(settings, loaded, money, stream)
            try:
                service.run(listener, on_ready)
            finally:
                service.close()


def make_data_dir(path: Path) -> None:
    """Create the data directory, for its owner alone: it holds prompts' KV and the ledger."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}; check --data-dir") from None
    if is_locked(disk_path(path)):
        raise DirectoryLocked(
            f"{path} is served by {read_holder(disk_path(path))}; stop that server or choose "
            f"another --data-dir"
        )


def check_address(server: ServerSection, *, requires_keys: bool) -> None:
    """A server that anybody may use must not be reachable by everybody. Raises ConfigError."""
    if requires_keys or is_loopback(server.host):
        return
    raise ConfigError(
        f"without API keys the server listens on loopback only, and {server.host} is not; create "
        f"a key with `cachesvc keys create`, or add --require-keys, or use --host 127.0.0.1"
    )


class Service:
    """Everything of one running server. `run` once, then `close`."""

    def __init__(
        self, settings: Settings, loaded: LoadedModel, money: Money, stream: EventStream
    ) -> None:
        self._settings = settings
        self._money = money
        self._violations = {"blocks": 0, "ledger": 0}
        self._closing = False
        self.bridge = OutputBridge()
        self._tracer = open_tracer(settings.tracing)
        on_end = self._tracer.trace if self._tracer is not None else lambda record: None
        self.journal = Journal(_journal_settings(settings.journal), on_end=on_end)
        self._quotas = QuotaBook(settings.cache, settings.server.data_dir)
        self.core = core.build(
            loaded,
            kv_dtype=settings.model.kv_dtype,
            cache=settings.cache,
            engine=settings.engine,
            data_dir=settings.server.data_dir,
            on_outputs=self._on_outputs,
            stream=stream,
            shares=self._quotas.shares,
        )
        self.metrics = Metrics(
            Snapshots(
                engine=self.core.engine.stats,
                money=money.stats,
                violations=lambda: self._violations,
            ),
            model=loaded.name,
            vllm_aliases=settings.metrics.vllm_aliases,
        )
        self.latencies = Latencies()
        self._storage = self._storage_meter()
        self.dashboard = Dashboard(
            settings,
            books=money.books,
            sources=Sources(
                model=loaded.name,
                engine=self.core.engine.stats,
                money=money.stats,
                violations=lambda: self._violations,
                counters=self.metrics.counters,
            ),
            latencies=self.latencies.spreads,
            working_set=partial(self.core.engine.call, TieredCache.working_set),
            blocks=partial(read_blocks, self.core.engine.call),
            journal=self.journal,
            explorer=self._explorer(),
            decode=loaded.tokenizer.decode,
            cache=CacheOperator(
                self.core.engine.call,
                self.core.layout.block_size,
                settings.server.data_dir,
                money.books.signer,
                self._storage,
            ),
        )
        self._encoders = EncoderPool(NUM_ENCODERS)
        self._feeds = Feeds(stream)
        self._grammars = GrammarDesk(self.core.grammars)

    def app(self, meter: Meter) -> Asgi:
        models = self._models()
        turn_tokens = self._settings.server.turn_tokens
        note_scopes(self._settings.server.data_dir, models.values())
        self._quotas.add(self._money.salts, models.values())
        wire = Collaborators(
            engine=self.core.engine,
            bridge=self.bridge,
            models=models,
            gatekeeper=self._money.gatekeeper,
            salts=self._money.salts,
            meter=meter,
            balances=self._money.accounts.tenant,
            receipt_keys=self._money.books.signer.published,
            limits=self._money.limits,
            replays=self._money.replays,
            journal=self.journal,
            encoders=self._encoders,
            grammars=self._grammars,
            conversations=Conversations(turn_tokens) if turn_tokens else None,
            readiness=self.readiness,
            render_metrics=self.metrics.render,
            settings=_wire_settings(self._settings),
            feeds=self._feeds,
        )
        app = create_app(
            wire, routers=(admin_router(self.dashboard.parts),), version=cachesvc.__version__
        )
        return Timed(app, self.metrics)

    def run(self, listener: socket.socket, on_ready: Callable[[str, str], None]) -> None:
        """Serve on `listener` until a signal comes."""
        server = self._settings.server
        config = uvicorn.Config(
            self.app(self._money.start(self.metrics.observe_bill)),
            loop="uvloop",
            http=BoundedConnection,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(server.drain)),
        )
        self.core.warm_up(self._settings.engine.chunk_tokens)
        self.core.start()

        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        http = HttpServer(
            config, lambda: on_ready(url, self.dashboard.first_link(url)), self._begin_drain
        )
        with (
            announced(server.data_dir, url, self.dashboard.parts.operator_token),
            asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
        ):
            runner.run(self._serve(http, listener))

    def close(self) -> None:
        """Stop the engine, flush the tiers. The ledger stays open for its owner to close."""
        self._closing = True
        started = time.monotonic()
        unsaved = self.core.close()
        self._encoders.shutdown()
        self._grammars.close()
        if self._tracer is not None:
            self._tracer.close()
        elapsed_s = time.monotonic() - started
        logger.info(f"stopped; the tiers were flushed in {elapsed_s:.1f} s, {unsaved} blocks lost")

    def readiness(self) -> Readiness:
        stats = self.core.engine.stats()
        if self._closing:
            return Readiness(False, "the server is shutting down")
        if stats.failed:
            return Readiness(False, f"the engine has failed: {stats.failed}")
        if broken := self._money.books.store.failed:
            return Readiness(False, f"the ledger is closed: {broken}")
        return Readiness(True, "", {"running": stats.num_running, "waiting": stats.num_waiting})

    async def _serve(self, http: "HttpServer", listener: socket.socket) -> None:
        tasks = [
            asyncio.create_task(self._count_blocks()),
            asyncio.create_task(self._watch_money()),
            asyncio.create_task(self._storage.run()),
            asyncio.create_task(self.dashboard.keep_history()),
        ]
        try:
            await http.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()

    async def _count_blocks(self) -> None:
        """Check the tiers' invariants while nobody computes; what is broken is counted."""
        while True:
            await asyncio.sleep(CHECK_S)
            stats = self.core.engine.stats()
            if stats.num_running or stats.num_waiting or stats.num_loading:
                continue
            try:
                checked = self.core.engine.call(lambda cache: cache.residency.check())
                await asyncio.wrap_future(checked)
            except AssertionError as error:
                self._violations["blocks"] += 1
                logger.error(f"an invariant of the tiers is broken: {error}")

    async def _watch_money(self) -> None:
        """Keep the ledger's snapshot fresh, and prove the ledger now and then."""
        for turn in itertools.count():
            try:
                await asyncio.to_thread(self._money.refresh)
                if turn % AUDIT_EVERY == AUDIT_EVERY - 1:
                    self._violations["ledger"] += await asyncio.to_thread(self._money.audit)
            except BillingError:
                logger.exception("the ledger cannot be read")
            await asyncio.sleep(MONEY_S)

    def _begin_drain(self) -> None:
        self._closing = True
        self._feeds.close()  # they have no end of their own to wait for

    def _on_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """Engine thread: hand over first, count afterwards."""
        self.bridge.deliver(outputs)
        self.metrics.observe_outputs(outputs)
        self.latencies.observe(outputs)

    def _explorer(self) -> Explorer:
        disk = self.core.cache.disk
        return Explorer(
            self.core.engine.call,
            self._owners(),
            disk.view if isinstance(disk, DiskTier) else None,
            block_bytes=self.core.layout.nbytes,
        )

    def _storage_meter(self) -> StorageMeter:
        """Begins with the pins on record: also those whose time was over before this start."""
        data_dir, books = self._settings.server.data_dir, self._money.books
        return StorageMeter(
            self.core.engine.call,
            books.ledger,
            lambda: payers(data_dir, [each.tenant for each in books.accounts.tenants()]),
            books.accounts.record,
            pins=load_pins(disk_path(data_dir)),
        )

    def _owners(self) -> Owners:
        accounts = self._money.accounts
        return Owners(
            self._models(),
            self._money.salts,
            lambda: [tenant.tenant for tenant in accounts.tenants()],
        )

    def _models(self) -> Mapping[str, ServedModel]:
        loaded, engine = self.core.loaded, self.core.engine
        model = ServedModel(
            name=loaded.name,
            tokenizer=loaded.tokenizer,
            detokenizer=self.core.detokenizer,
            scope=self.core.scope,
            max_context=min(loaded.max_context, engine.max_tokens),
            vocab_size=loaded.vocab_size,
            created=int(time.time()),
        )
        adapted = {
            name: replace(
                model,
                name=name,
                scope=replace(model.scope, adapter=digest),
                adapter=name,
                parent=model.name,
            )
            for name, digest in loaded.adapters.digests.items()
        }
        return {model.name: model, **adapted}


def _wire_settings(settings: Settings) -> WireSettings:
    server = settings.server
    return WireSettings(
        max_body_bytes=server.max_body_bytes,
        max_choices=server.max_choices,
        write_timeout_s=server.write_timeout,
        keepalive_s=server.keepalive,
        perceptual_digests=settings.cache.perceptual_digests,
    )


def _journal_settings(journal: JournalSection) -> JournalSettings:
    return JournalSettings(
        max_requests=journal.requests,
        max_bytes=journal.bytes,
        keep_prompts=journal.keep_prompts,
    )
