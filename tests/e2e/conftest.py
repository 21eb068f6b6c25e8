"""One server for all tests of the dashboard, a browser for each module, a visit for each test."""

import contextlib
from dataclasses import dataclass

import pytest

from api.app import create_app
from tests.dashboard_server import Visitor, chromium, serving
from tests.live_server import serve
from tests.running_server import listening
from tests.support.wire import FakeHouse, fake_house


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A server that has answered three requests: a cold one, a hit, and another prefix."""
    with serving(tmp_path_factory.mktemp("dashboard")) as running:
        for question in ("Where does person 3 live?", "Which badge has person 5?"):
            running.ask(question)
        running.ask("Who are you?", system="")
        yield running


@dataclass(frozen=True)
class Server:
    house: FakeHouse
    url: str


@pytest.fixture
def server():
    """A server over the scripted engine."""
    house = fake_house()
    with contextlib.closing(house), listening(create_app(house.wire)) as url:
        yield Server(house, f"{url}/v1")
    assert all(charge.num_settled + charge.num_voided == 1 for charge in house.meter.charges)


@pytest.fixture(scope="session")
def default_server(tmp_path_factory):
    """The URL of `cachesvc serve` on the default model, for the tests of client libraries."""
    folder = tmp_path_factory.mktemp("clients")
    with serve(folder / "serve.log", "--data-dir", folder, "--disk-cache", "64MiB") as (_, url):
        yield url


@pytest.fixture(scope="module")
def browser():
    """Playwright runs an event loop in this thread: no other module may run meanwhile."""
    with chromium() as opened:
        yield opened


@pytest.fixture
def visitor(browser, served):
    """Not logged in yet; `visitor.log_in()` opens the overview."""
    visit = Visitor(browser, served)
    yield visit
    visit.close()
