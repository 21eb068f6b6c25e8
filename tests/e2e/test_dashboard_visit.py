"""The dashboard as a person sees it: a real server, a real browser, and what holds on each page.

Pictures of every page go to `artifacts/dashboard`.
"""

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from api.admin.login.passwords import Passwords
from api.admin.login.sessions import Role
from tests.dashboard_server import Served, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.timeout(1800)]

PAGES = {"overview": "/admin", "cache": "/admin/cache", "working-set": "/admin/working-set"}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "narrow": {"viewport": {"width": 320, "height": 720}, "has_touch": True},
    "wide": {"viewport": {"width": 1920, "height": 1080}},
}
MAX_PAGE_BYTES = 150_000
MAX_SHIFT = 0.1  # web.dev's bound of a good cumulative layout shift
WATCH_SHIFTS = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""
PASSWORD = "four words for tests"


def live(page: Page) -> None:
    """Until the first numbers are there."""
    expect(page.locator("#state")).to_contain_text("live")


def test_numbers_change_while_requests_run(visitor: Visitor) -> None:
    page = visitor.log_in()
    live(page)
    saved = page.locator("[data-over='delta:traffic.saved_units.CNY']")
    legend = page.locator(".legend output").first
    before = saved.inner_text()
    for number in range(3):
        visitor.served.ask(f"Where does person {number} live?")
    expect(saved).not_to_have_text(before)
    assert float(saved.inner_text()) > (0 if before == "–" else float(before))
    expect(legend).to_have_text(re.compile(r"^[\d.]+(?: k)?/s$"))  # a rate, and nothing else
    assert page.locator("section.empty").is_hidden()


def test_a_week_of_a_young_server_shows_its_first_minutes(visitor: Visitor) -> None:
    page = visitor.log_in()
    page.goto("/admin?window=604800")
    expect(page.locator("#state")).to_have_text(re.compile(r"^live, of \d+"))
    expect(page.locator(".legend output").first).to_have_text(re.compile(r"\d"))


@pytest.mark.parametrize("hours", [48, 168])
def test_the_axis_of_days_has_dates(visitor: Visitor, hours: int) -> None:
    """The texts that the charts draw, over samples of these hours."""
    visitor.context.add_init_script(
        "window.drawn = new Set(); const draw = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {"
        " window.drawn.add(text); draw.call(this, text, ...rest); };"
    )
    times = [1_795_000_000 + 30 * hours * n for n in range(120)]
    series = {"value:engine.num_running": times}
    told = {"step_s": 30 * hours, "times": times, "series": series, "over": {}}
    page = visitor.log_in()
    page.route("**/admin/api/history?*", lambda route: route.fulfill(json=told))
    page.goto(f"/admin?window={hours * 3600}")
    live(page)
    drawn = page.evaluate("[...window.drawn]")
    assert any(re.fullmatch(r"\d\d Nov", text) for text in drawn), drawn


@pytest.mark.parametrize("look", LOOKS)
def test_every_page_is_accessible_and_fits(browser: Browser, served: Served, look: str) -> None:
    visitor = Visitor(browser, served, **LOOKS[look])
    visitor.context.add_init_script(WATCH_SHIFTS)
    page = visitor.log_in()
    for name, path in PAGES.items():
        page.goto(path)
        live(page)
        page.wait_for_timeout(300)
        visitor.shot(f"{name}-{look}")
        assert visitor.overflow() <= 0, name
        assert [] == visitor.violations(), name
        assert page.evaluate("window.shift") < MAX_SHIFT, name
    visitor.close()


@pytest.mark.parametrize("path", PAGES.values())
def test_a_page_is_light(browser: Browser, served: Served, path: str) -> None:
    """Bytes over the wire on a first visit, everything that the page loads counted."""
    door = Visitor(browser, served)
    door.log_in()
    visitor = Visitor(browser, served)
    visitor.context.add_cookies(door.context.cookies())
    sizes: list[int] = []
    visitor.page.on("requestfinished", lambda request: sizes.append(_size(request)))
    visitor.page.goto(path)
    live(visitor.page)
    visitor.close()
    door.close()
    assert 0 < sum(sizes) < MAX_PAGE_BYTES


def _size(request: Any) -> int:
    sizes: dict[str, int] = request.sizes()
    return sizes["responseBodySize"] + sizes["responseHeadersSize"]


def test_a_password_opens_the_door_and_logging_out_closes_it(visitor: Visitor) -> None:
    Passwords(visitor.served.data_dir).set("ada", PASSWORD, Role.READER)
    page = visitor.page
    page.goto("/admin/cache")
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill("not the password")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("did not match")
    visitor.troubles.clear()  # the browser's own note of the 401
    visitor.shot("login")
    assert [] == visitor.violations()
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Cache", exact=True)).to_be_visible()
    expect(page.get_by_text("read only")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    page.goto("/admin")
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()


def test_the_keyboard_reaches_everything(visitor: Visitor) -> None:
    page = visitor.log_in()
    live(page)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("3")
    expect(page.get_by_label("1 h")).to_be_checked()
    assert "?window=3600" in page.url
    page.keyboard.press("p")
    expect(page.locator("#state")).to_have_text("paused")
    page.keyboard.press("p")
    live(page)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("g")
    page.keyboard.press("c")
    expect(page.get_by_role("heading", name="Cache", exact=True)).to_be_visible()


def test_the_theme_is_kept_and_drawn_without_a_flash(visitor: Visitor) -> None:
    page = visitor.log_in()
    ground = "getComputedStyle(document.body).color"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Theme").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert "dark" == page.locator("html").get_attribute("data-theme")
    assert dark == page.evaluate(ground)
    page.keyboard.press("t")
    assert light == page.evaluate(ground)


def test_all_charts_share_the_cursor(visitor: Visitor) -> None:
    page = visitor.log_in()
    live(page)
    visitor.served.ask("Which badge has person 2?")
    page.wait_for_timeout(2500)
    plots = page.locator(".u-over")
    box = plots.first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 20)
    lines = page.locator(".u-cursor-x")
    places = [line.evaluate("e => e.style.transform") for line in lines.all()[:3]]
    assert 1 == len(set(places))
    assert places[0] not in ("", "translate(-10px, 0px)")
