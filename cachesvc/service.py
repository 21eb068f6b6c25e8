"""The composition root: builds every part from settings, joins them, serves, and shuts down.

    Settings ─► model ─► tiers ─► engine ─┬─► app ─► HTTP server
             └► store ─► accounts ─► ledger ┘

Runs on the main thread, whose event loop is the server's. Shutdown (SIGTERM, SIGINT) lets running
requests finish for `server.drain`, then closes the engine, flushes the tiers and closes the ledger.
"""

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import cachesvc
from api.access.overload import QueueBound
from api.app import create_app
from api.cache.explorer import Explorer
from api.cache.feeds import Feeds
from api.cache.owners import Owners
from api.collaborators import (
    Access,
    Bookkeeping,
    CacheParts,
    Collaborators,
    Inference,
    Readiness,
    Records,
    WireSettings,
)
from api.journal.journal import Journal, JournalSettings, RequestRecord
from api.requests.bridge import OutputBridge
from api.requests.encoders import encoder_pool
from api.requests.fingerprints import Fingerprints
from api.requests.kept import Purges, owner_of
from api.requests.metering import Meter
from api.requests.quote import Quotes
from api.requests.responses import StoredResponses
from api.requests.retention import Retention
from api.requests.turns import Conversations
from api.served_model import ServedModel
from billing.errors import BillingError
from cachesvc.config.places import disk_path
from cachesvc.config.settings import Settings
from cachesvc.observability.latency import Latencies
from cachesvc.observability.metrics import Metrics
from cachesvc.observability.snapshot import Sources
from cachesvc.observability.tracing import open_tracer
from cachesvc.operator.block_reader import read_blocks
from cachesvc.operator.operator import CacheOperator
from cachesvc.operator.publisher import BlockPublisher
from cachesvc.operator.quotas import QuotaBook
from cachesvc.operator.scopes import ScopeKind, note_scopes, payers, salt_of
from cachesvc.operator.storage_meter import StorageMeter
from cachesvc.operator.survey import CacheSurvey
from cachesvc.operator.tenant_pins import CachePins
from cachesvc.server.backend import Backend, MakeBackend
from cachesvc.server.connection import http_config
from cachesvc.server.dashboard import Dashboard
from cachesvc.server.http import Asgi, HttpServer, Timed
from cachesvc.server.kept_turns import KeptTurns, forget_stored
from cachesvc.server.listen import url_of
from cachesvc.server.money import Money
from cachesvc.server.remembered import Remembered
from cachesvc.server.server_file import announced
from cachesvc.server.spare_memory import SpareMemory
from cachesvc.server.state_file import FILE_NAME, StateFile
from engine.errors import EngineFailed
from engine.request import StepOutput
from engine.text.outline import Outline
from tiers.disk.pin_file import load_pins
from tiers.telemetry.events import EventStream
from tiers.tier import TierStats

logger = logging.getLogger(__name__)

CONTENTS = ("weights", "tokenizer", "adapter", "layout", "arithmetic")  # of a scope, as digests
WATCH_S = 0.5  # interval of checks on the engine
CHECK_S = 60.0  # interval of checks on an idle engine's blocks
MONEY_S = 10.0  # interval of checks on holds and balances
AUDIT_EVERY = 360  # of these checks, one proves the whole ledger


class Service:
    """Everything of one running server: `start`, `run`, then `close`."""

    def __init__(
        self, settings: Settings, make_backend: MakeBackend, money: Money, stream: EventStream
    ) -> None:
        self._settings = settings
        self._money = money
        self._violations = {"blocks": 0, "ledger": 0}
        self._closing = False
        self.bridge = OutputBridge()
        self._tracer = open_tracer(settings.tracing)
        self._state = StateFile(settings.server.data_dir / FILE_NAME)
        self._remembered = Remembered(self._state, max_records=settings.journal.requests)
        kept = settings.journal
        self.journal = Journal(
            JournalSettings(max_requests=kept.requests, keep_prompts=kept.keep_prompts),
            on_end=self._on_end,
        )
        self.journal.restore(self._remembered.records())
        self._turns = KeptTurns(self._state)
        self._conversations = Conversations(kept=self._turns)
        self._responses = StoredResponses(kept=self._turns)
        self._fingerprints = Fingerprints(self._turns)
        self._purges = Purges()
        self._quotas = QuotaBook(settings.cache, settings.server.data_dir)
        self.core: Backend = make_backend(self._on_outputs, stream, self._quotas.shares)
        loaded = self.core.loaded
        latencies = Latencies()
        sources = Sources(
            engine=self.core.engine.stats,
            money=money.stats,
            violations=lambda: self._violations,
            model=loaded.name,
        )
        self.metrics = Metrics(sources, latencies)
        self._storage = self._storage_meter()
        self._operator = CacheOperator(
            self.core.engine.call,
            self.core.layout.block_size,
            settings.server.data_dir,
            money.books.signer,
            self._storage,
            forget=self._forget_owner,
        )
        self.dashboard = Dashboard(
            settings,
            books=money.books,
            sources=sources,
            counters=self.metrics.counters,
            latencies=latencies.spreads,
            working_set=partial(self.core.engine.call, lambda cache: cache.working_set()),
            blocks=partial(read_blocks, self.core.engine.call),
            journal=self.journal,
            explorer=Explorer(
                self.core.engine.call,
                self._owners(),
                self.core.disk_view,
                block_bytes=self.core.layout.nbytes,
            ),
            decode=loaded.tokenizer.decode,
            outline=Outline(loaded.tokenizer),
            cache=self._operator,
            readiness=self.readiness,
        )
        self.dashboard.remember(self._remembered, self.core.operations.index)
        self._state.start()
        self._turns.start()
        self._encoders = encoder_pool()
        self._feeds = Feeds(stream)
        self._spare_memory = SpareMemory()

    def app(self, meter: Meter) -> Asgi:
        models = self._models()
        note_scopes(self._settings.server.data_dir, models.values())
        self._quotas.add(self._money.salts, models.values())
        self.core.tell_owners(self._quotas.owners.names())
        engine, block_size = self.core.engine, self.core.layout.block_size
        wire = Collaborators(
            access=Access(
                gatekeeper=self._money.gatekeeper,
                salts=self._money.salts,
                limits=self._money.limits,
                queue=QueueBound(
                    engine,
                    max_wait_s=self._settings.engine.max_wait,
                    max_in_flight=self._settings.engine.max_waiting,
                ),
            ),
            inference=Inference(
                engine=engine,
                bridge=self.bridge,
                models=models,
                encoders=self._encoders,
                grammars=self.core.grammars,
            ),
            books=Bookkeeping(
                meter=meter,
                balances=self._money.accounts.tenant,
                store=self._money.books.store,
                receipt_keys=self._money.books.signer.published,
                replays=self._money.replays,
            ),
            records=Records(
                journal=self.journal,
                conversations=self._conversations,
                responses=self._responses,
                fingerprints=self._fingerprints,
                purges=self._purges,
            ),
            cache=CacheParts(
                retention=Retention(CachePins(engine.call, self._operator)),
                quotes=Quotes(
                    engine, meter, CacheSurvey(engine.call, self.core.operations, block_size)
                ),
                feeds=self._feeds,
                publisher=BlockPublisher(engine.call, block_size) if self.core.is_shared else None,
            ),
            settings=_wire_settings(self._settings),
            readiness=self.readiness,
            render_metrics=self.metrics.render,
        )
        app = create_app(wire, admin=self.dashboard.parts, version=cachesvc.__version__)
        return Timed(app, self.metrics)

    def start(self) -> None:
        """Starts the ledger, the app and the engine, whose first steps warm it up."""
        self._config = http_config(
            self.app(self._money.start(self.metrics.observe_bill)),
            loop="uvloop",
            lifespan="on",
            timeout_graceful_shutdown=max(1, round(self._settings.server.drain)),
        )
        self.core.start(self._settings.engine.chunk_tokens)

    def run(self, listener: socket.socket, on_ready: Callable[[str, str], None]) -> None:
        """Serves on `listener` until a signal comes. Call after `start`."""
        server, config, url = self._settings.server, self._config, url_of(listener)
        http = HttpServer(
            config, lambda: on_ready(url, self.dashboard.first_link(url)), self._begin_drain
        )
        with (
            announced(server.data_dir, url, self.dashboard.parts.operator_token),
            asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
        ):
            runner.run(self._serve(http, listener))
        if (failure := self.core.engine.failure) is not None:
            raise EngineFailed(
                f"the engine has failed, and the server ends so that it can be started again: "
                f"{failure!r}"
            ) from failure

    def close(self) -> None:
        """Stops the engine and flushes the tiers. The ledger's owner closes the ledger."""
        self._closing = True
        started, cache = time.monotonic(), self.core.engine.stats().cache
        unsaved = self.core.close()
        self.dashboard.keep_hits(
            self.core.operations.index.dump_hits()
        )  # the engine's thread has ended
        self._encoders.close()
        if self._tracer is not None:
            self._tracer.close()
        self.dashboard.close()
        self._state.close()
        if cache.disk is None:
            unsaved += cache.device.num_blocks + cache.host.num_blocks
            logger.info(f"stopped; without a disk tier, {unsaved} blocks lost")
            return
        elapsed_s = time.monotonic() - started
        logger.info(f"stopped; the tiers were flushed in {elapsed_s:.1f} s, {unsaved} blocks lost")

    def readiness(self) -> Readiness:
        stats = self.core.engine.stats()
        if self._closing:
            return Readiness(False, "the server is shutting down")
        if stats.failed:
            return Readiness(False, f"the engine has failed: {stats.failed}", alive=False)
        if refused := self._money.books.ledger.refuses:
            return Readiness(False, refused)
        detail = {"running": stats.num_running, "waiting": stats.num_waiting}
        disk = stats.cache.disk
        limited = {"limited": [disk.limit]} if disk is not None and disk.limit else {}
        return Readiness(True, "", detail | limited | _degraded(disk))

    async def _serve(self, http: "HttpServer", listener: socket.socket) -> None:
        tasks = [
            asyncio.create_task(self._count_blocks()),
            asyncio.create_task(self._watch_money()),
            asyncio.create_task(self._storage.run()),
            asyncio.create_task(self.dashboard.keep_history()),
            asyncio.create_task(self._watch_engine(http)),
        ]
        try:
            await http.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()

    async def _watch_engine(self, http: "HttpServer") -> None:
        """Ends the server if its engine has died, so that the supervisor restarts it."""
        while self.core.engine.failure is None:  # noqa: ASYNC110 - its thread knows no loop
            await asyncio.sleep(WATCH_S)
        http.should_exit = True

    async def _count_blocks(self) -> None:
        """While the engine is idle: returns spare memory, checks the tiers' invariants, and counts
        violations."""
        while True:
            await asyncio.sleep(CHECK_S)
            stats = self.core.engine.stats()
            if stats.num_running or stats.num_waiting or stats.num_loading:
                continue
            await asyncio.to_thread(self._spare_memory.give_back)
            try:
                checked = self.core.engine.call(lambda cache: cache.check())
                await asyncio.wrap_future(checked)
                hits = self.core.engine.call(lambda cache: cache.index.dump_hits())
                self.dashboard.keep_hits(await asyncio.wrap_future(hits))
            except AssertionError as error:
                self._violations["blocks"] += 1
                logger.error(f"an invariant of the tiers is broken: {error}")

    async def _watch_money(self) -> None:
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

    def _begin_drain(self) -> None:
        self._closing = True
        self._feeds.close()  # feeds never end by themselves

    def _on_end(self, record: RequestRecord) -> None:
        """Passes an ended request to its observers."""
        self._remembered.keep_record(record)
        if self._tracer is not None:
            self._tracer.trace(record)

    async def _forget_owner(self, kind: ScopeKind, name: str) -> None:
        """Removes a purged owner's conversations together with its blocks. Raises PurgeFailed."""
        owner = owner_of(salt_of(self._money.salts, name, kind))
        self._purges.note(owner)
        self._responses.forget(owner)
        self._fingerprints.forget(owner)
        self._conversations.forget(owner)
        await asyncio.to_thread(forget_stored, self._settings.server.data_dir, owner)

    def _on_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """Delivers outputs, then counts them. Engine thread."""
        self.bridge.deliver(outputs)
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

    def _owners(self) -> Owners:
        accounts = self._money.accounts
        return Owners(
            self._models(),
            self._money.salts,
            lambda: {each.tenant: each.currency for each in accounts.tenants()},
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
            images=loaded.images,
            created=int(time.time()),
            promise=self.core.promise,
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
        return {
            name: self._with_exactness(each)
            for name, each in {model.name: model, **adapted}.items()
        }

    def _with_exactness(self, model: ServedModel) -> ServedModel:
        """The model with what its clients may know of its exactness: what serves it, and digests of
        all that its blocks depend on besides tokens and tenant."""
        if not self.core.facts:
            return model
        contents = {name: getattr(model.scope, name).hex() for name in CONTENTS}
        mode = {"cachesvc": cachesvc.__version__, "exact": self._settings.model.exact}
        serves = {"model": model.name, **mode, **self.core.facts, **contents}
        return replace(model, exactness={"serves": serves})


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


def _wire_settings(settings: Settings) -> WireSettings:
    server = settings.server
    return WireSettings(
        max_body_bytes=server.max_body_bytes,
        cors_origins=server.cors_origins,
        image_dir=server.data_dir / "images",
        system_in_place=server.system_in_place,
    )
