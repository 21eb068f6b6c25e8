"""One server for all tests of the dashboard, a browser for each module, a visit for each test."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.dashboard_server import Served, Visitor, chromium, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that has answered three requests: a cold one, a hit, and another prefix."""
    with serving(tmp_path_factory.mktemp("dashboard")) as running:
        for question in ("Where does person 3 live?", "Which badge has person 5?"):
            running.ask(question)
        running.ask("Who are you?", system="")
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Playwright runs an event loop in this thread: no other module may run meanwhile."""
    with chromium() as opened:
        yield opened


@pytest.fixture
def visitor(browser: Browser, served: Served) -> Iterator[Visitor]:
    """Not logged in yet; `visitor.log_in()` opens the overview."""
    visit = Visitor(browser, served)
    yield visit
    visit.close()
