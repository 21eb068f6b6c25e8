"""`serve`: runs a server from settings until a signal stops it. Main thread.

First it rejects what cannot work: a data directory in use, a full disk, a missing GPU, vLLM or
model, tiers larger than memory, a port in use, a foreign address, a remote tier that cannot be
opened. Slow imports and loading come last. Until all is ready, the port refuses connections.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cachesvc.config.idle import idle_settings
from cachesvc.config.sections import EventsSection
from cachesvc.config.settings import Settings, main_of
from cachesvc.importing import importing
from cachesvc.observability.kv_events import published
from cachesvc.server.listen import bind, check_address, check_memory, make_data_dir
from cachesvc.server.money import open_money
from cachesvc.server.remote import check_remote
from cachesvc.server.supervisor import notify
from cachesvc.server.vllm.arguments import check_installed
from engine.driver import check_device, may_have_gpu
from engine.garbage import scanning_seldom
from engine.lean import without_training
from engine.models.files import check
from tiers.telemetry.events import EventStream

if TYPE_CHECKING:
    from tiers.stats import CacheStats  # torch

logger = logging.getLogger(__name__)

TIERS = "opening tiers and engine"
SAY_EVERY_S = 10.0  # how far work within a phase is


class Startup:
    """The time of each phase of a start; logs what is done. Loading a model takes minutes."""

    def __init__(self) -> None:
        self._said, self._said_s = "", 0.0
        self._began_s = time.monotonic()
        self.took_s: dict[str, float] = {}  # of each finished phase, in order

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts the block as `phase`."""
        began_s = time.monotonic()
        logger.info(phase)
        yield
        self.took_s[phase] = time.monotonic() - began_s

    def progress(self, what: str, part: float) -> None:
        """Logs work within a phase, now and then; `part` is the done share, from 0 to 1."""
        now_s = time.monotonic()
        if part < 1 and (what != self._said or now_s - self._said_s >= SAY_EVERY_S):
            self._said, self._said_s = what, now_s
            logger.info(f"{what}: {part:.0%}" if part else what)

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._began_s


def serve(
    settings: Settings,
    *,
    startup: Startup | None = None,
    on_ready: "Callable[[CacheStats, str, str], None]" = lambda cache, url, link: None,
) -> None:
    """Serves until a signal stops it. Raises configuration errors before the first request.

    Once it accepts requests, `on_ready` is called with the tiers as they are, the server's URL and
    a one-time login link for its dashboard.
    """
    server, startup = settings.server, startup or Startup()
    each = settings.each()
    for one in each:
        if idle := ", ".join(idle_settings(one)):
            logger.warning(f"without effect with engine {one.engine.backend}: {idle}")
    main = main_of(each)
    settings, names = each[main], ", ".join(one.model.client_name for one in each)
    over_vllm, at_url = settings.engine.backend == "vllm", bool(settings.engine.urls)
    make_data_dir(server.data_dir)
    check_device(settings.model.device)
    if over_vllm:
        check_installed()
    if not at_url:  # which has the weights
        check_memory(settings.cache, on_gpu=settings.model.device != "cpu" and may_have_gpu())
        check(settings.model.name, settings.model.adapters)
        check_remote(settings.cache)
    with contextlib.closing(open_money(settings)) as money:
        check_address(server, requires_keys=money.requires_keys)
        stream = EventStream()
        with (
            contextlib.closing(bind(server.host, server.port)) as listener,
            published(EventsSection() if over_vllm or at_url else settings.events, stream),
            contextlib.ExitStack() as service_open,
        ):
            with contextlib.ExitStack() as lean:
                with startup.during("importing" if at_url else "importing torch"), _importing():
                    if not (over_vllm or at_url):
                        lean.enter_context(without_training())
                        import cachesvc.server.compute  # noqa: F401  torch, seconds of it
                    from cachesvc.server import engines
                with startup.during(f"loading {names}"):
                    # Not in a `with`: Ctrl-C would wait for the model, or for a compiler.
                    thread = ThreadPoolExecutor(1, thread_name_prefix="cachesvc-prepare")
                    prepared = thread.submit(
                        lambda: [engines.prepare(one, startup.progress) for one in each]
                    )
                    with _importing():  # the rest, while that thread loads weights
                        from cachesvc.service import Service
                    makers = prepared.result()
                    thread.shutdown()
                opening = "starting vLLM" if over_vllm else "asking the engine" if at_url else TIERS
                with startup.during(opening):
                    service = Service(makers, main, money, stream)
                    service_open.callback(service.close)
                with startup.during("warming up"):
                    service.start()

            def ready(url: str, link: str) -> None:
                notify("READY=1")
                on_ready(service.core.engine.stats().cache, url, link)

            service_open.enter_context(scanning_seldom())
            service_open.callback(notify, "STOPPING=1")  # called before the service closes
            service.run(listener, ready)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Runs imports without garbage collection, and freezes the imported objects."""
    with importing():
        try:
            yield
        finally:
            gc.freeze()
