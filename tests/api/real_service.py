"""The service as `serve` builds it over a model in a folder, in process, without its socket."""

import contextlib

import httpx

from cachesvc.config.settings import main_of
from cachesvc.config.sources import load_settings
from cachesvc.server import engines
from cachesvc.server.listen import make_data_dir
from cachesvc.server.money import open_money
from cachesvc.service import Service
from tiers.telemetry.events import EventStream


@contextlib.contextmanager
def real_service(data_dir, model, **more):
    """The service, its app and its ledger. `more` settings go by section_name. Without a model,
    `models` lists several."""
    settings = load_settings(
        {
            "server.data_dir": data_dir,
            **({"model.name": str(model), "model.device": "cpu"} if model else {}),
            "cache.block_size": 16,
            "cache.device_bytes": 8 << 20,
            "cache.host_bytes": 8 << 20,
            "cache.disk_bytes": 64 << 20,
        }
        | {name.replace("_", ".", 1): value for name, value in more.items()}
    ).settings
    make_data_dir(data_dir)
    with contextlib.closing(open_money(settings)) as money:
        each = settings.each()
        main = main_of(each)
        makers = [engines.prepare(one) for one in each]
        with contextlib.closing(Service(makers, main, money, EventStream())) as service:
            app = service.app(money.start(service.metrics.observe_bill))
            for serving in service.servings:
                serving.core.start(64)
            yield service, app, money


@contextlib.asynccontextmanager
async def served(data_dir, model, **more):
    """The same with a client of it."""
    with real_service(data_dir, model, **more) as (service, app, _):
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://localhost"
            ) as client,
        ):
            yield service, client
