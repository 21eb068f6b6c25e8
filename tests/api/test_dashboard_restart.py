"""The dashboard over a restart of the real service: logins, requests and charts are still there."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.admin.login.sessions import Admin
from cachesvc.config.sources import load_settings
from cachesvc.server import compute
from cachesvc.server.listen import make_data_dir
from cachesvc.server.money import open_money
from cachesvc.service import Service
from engine.testing.models import save_tiny_model
from tiers.telemetry.events import EventStream

PERSON = {"accept": "text/html"}


@contextlib.asynccontextmanager
async def run(data_dir: Path, model: Path) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """One run of the service on a data directory, without its socket."""
    settings = load_settings(
        {
            "server.data_dir": data_dir,
            "model.name": str(model),
            "model.device": "cpu",
            "cache.block_size": 16,
            "cache.device_bytes": 8 << 20,
            "cache.host_bytes": 8 << 20,
            "cache.disk_bytes": 64 << 20,
        }
    ).settings
    make_data_dir(data_dir)
    with contextlib.closing(open_money(settings)) as money:
        loaded = compute.load(settings.model, data_dir)
        with contextlib.closing(
            Service(settings, compute.over(loaded, settings), money, EventStream())
        ) as service:
            app: Any = service.app(money.start(service.metrics.observe_bill))
            service.core.start()
            async with (
                app.app.router.lifespan_context(app.app),
                httpx.AsyncClient(
                    transport=httpx.ASGITransport(app), base_url="http://localhost"
                ) as client,
            ):
                yield service, client


async def test_a_restart_loses_nothing_that_an_admin_saw(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(model)
    data_dir = tmp_path / "data"
    async with run(data_dir, model) as (service, client):
        link = service.dashboard.parts.sessions.make_link(Admin("ada"), 60)
        assert 200 == (await client.get(f"/admin/login?token={link}", headers=PERSON)).status_code
        body = {"model": str(model), "prompt": "Call me Ishmael. " * 8, "max_tokens": 4}
        service.dashboard.history.sample()
        answer = (await client.post("/v1/completions", json=body)).json()
        service.dashboard.history.sample()
        cookies = client.cookies
        request_id = answer["id"].removeprefix("cmpl-")
    async with run(data_dir, model) as (service, client):
        client.cookies = cookies
        page = await client.get("/admin/requests", headers=PERSON)
        assert 200 == page.status_code, "still logged in"
        assert request_id[:8] in page.text
        assert (
            200 == (await client.get(f"/admin/requests/{request_id}", headers=PERSON)).status_code
        )
        service.dashboard.history.sample()
        rings = service.dashboard.history.read(["delta:traffic.generation_tokens"], window_s=60)
        assert 4 == sum(rings["series"]["delta:traffic.generation_tokens"])
        client.cookies = cookies
