"""An app over the scripted engine, and a client that speaks to it in process.

After each test: every charge was settled or voided exactly once, every feed was closed, and the
engine runs nothing.
"""

import asyncio
import contextlib

import httpx
import pytest

from api.app import create_app
from billing.keys import Principal, Scope
from tests.api.bank import Bank
from tests.patience import PATIENCE_S
from tests.support.admin import RecordingTrail
from tests.support.stand_in import served
from tests.support.upstream import UpstreamServer
from tests.support.wire import fake_house


@contextlib.asynccontextmanager
async def running(house, admin=None):
    """The app started, and a client; ends with the checks that hold after every test."""
    app = create_app(house.wire, admin=admin)
    transport = httpx.ASGITransport(app)
    try:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            yield app, client
            await quiet(house, app)
            assert all(
                charge.num_settled + charge.num_voided == 1
                for charge in house.meter.charges
                if house.meter.fail_settle is None
            )
    finally:
        house.close()


@contextlib.asynccontextmanager
async def serving(bank):
    async with running(bank.house) as (app, client):
        yield app, client, bank.house


class GateOf:
    """Lets each request in as the next of these tenants."""

    def __init__(self, *tenants):
        self._tenants = iter(tenants)

    async def identify(self, authorization):
        return Principal(next(self._tenants), key_id="k", scopes=frozenset(Scope))


class NamedGate:
    """Whoever asks is the tenant that the Authorization header names."""

    async def identify(self, authorization):
        return Principal(authorization or "default", scopes=frozenset(Scope))


def refusal(answer):
    """The status and the code of an error."""
    return answer.status_code, answer.json()["error"]["code"]


def of(document, *names):
    """These of its values, in their order."""
    return tuple(document[name] for name in names)


async def quiet(house, app):
    """Waits until nothing of any request is left."""
    async with asyncio.timeout(30):
        while (
            app.state.deliveries or house.wire.inference.bridge.num_open or house.engine.num_running
        ):
            await asyncio.sleep(0.005)


async def until_engines(client, told):
    """Waits until readiness says this of the engines that are not used."""
    async with asyncio.timeout(PATIENCE_S):
        while told != (await client.get("/health/ready")).json().get("engines"):
            await asyncio.sleep(0.02)


async def begun(house, *, requests=0, tokens=0):
    """Waits until the engine has been given so many requests and has made so many tokens."""
    engine = house.engine
    async with asyncio.timeout(30):
        while len(engine.requests) < requests or sum(engine.tokens_made.values()) < tokens:
            await asyncio.sleep(0.005)


@pytest.fixture
def house():
    return fake_house()


@pytest.fixture
def up():
    """An endpoint that answers each protocol."""
    with served(UpstreamServer()) as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a tiny model."""
    from tests.support.models import save_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    return folder


@pytest.fixture
def trail():
    return RecordingTrail()


@pytest.fixture
async def bank(tmp_path):
    bank = Bank(tmp_path)
    with contextlib.closing(bank):
        yield bank


@pytest.fixture
async def app_and_client(house):
    async with running(house) as pair:
        yield pair


@pytest.fixture
def client(app_and_client):
    return app_and_client[1]


@pytest.fixture
def app(app_and_client):
    return app_and_client[0]
