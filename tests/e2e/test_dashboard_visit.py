"""The dashboard as a person sees it: a real server, a real browser."""

import pytest

from tests.dashboard_server import Visitor

pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.timeout(120)]


def test_numbers_change_while_requests_run(visitor: Visitor) -> None:
    page = visitor.log_in()
    requests = page.locator("[data-over='delta:traffic.saved_units.CNY']")
    page.wait_for_function("document.getElementById('state').textContent === 'live'")
    before = requests.inner_text()
    for number in range(3):
        visitor.served.ask(f"Where does person {number} live?")
    page.wait_for_function(
        "before => document.querySelector("
        "\"[data-over='delta:traffic.saved_units.CNY']\").textContent !== before",
        arg=before,
    )
    assert float(requests.inner_text()) > (0 if before == "–" else float(before))
    visitor.shot("overview-light")
