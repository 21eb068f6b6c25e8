"""The dashboard as a person sees it: a real server, a real browser, and what holds on each page.

The first walk of docs/walk.md is done click by click: each numbered line is one step. Pictures of
every page go to `artifacts/dashboard`.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.dashboard_server import TEXT, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.timeout(1800)]

DOCS = Path(__file__).parents[2] / "docs"
WALK, IMAGES = DOCS / "walk.md", DOCS / "images"
STEP = re.compile(r"^\d+\. (.+)$")
LIVE = ("/admin", "/admin/cache")
PAGES = tuple(
    f"/admin/{name}"
    for name in ("explorer", "requests", "money", "tenants", "tenants/default", "keys", "audit")
)
LOOKS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "narrow": {"viewport": {"width": 320, "height": 720}, "has_touch": True},
    "wide": {"viewport": {"width": 1920, "height": 1080}},
}
WIDER = """[...document.querySelectorAll('main *')]
  .filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth)
  .map(e => `${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`)"""
MAX_PAGE_BYTES = 150_000
MAX_SHIFT = 0.1  # web.dev's bound of a good cumulative layout shift
WATCH_SHIFTS = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""
NUM_PROMPTS = 12  # more than the memory tiers hold, so that some lie on disk


@pytest.fixture(scope="module")
def used(served):
    """The server after a day: prompts on disk, and at last one that parts from its twin."""
    for number in range(NUM_PROMPTS):
        served.ask("Who is that?", system=f"{number} {TEXT}")
    served.ask("Who is new?", system=f"You help. Today is Monday. {TEXT}")
    served.ask("Who is new?", system=f"You help. Today is Friday. {TEXT}")
    return served


def live(page: Page) -> None:
    """Until the first numbers are there."""
    expect(page.locator("#state")).to_contain_text("live")


def sections() -> list[tuple[str, list[str]]]:
    """The page's headings, each with its steps."""
    found: list[tuple[str, list[str]]] = []
    for line in WALK.read_text().splitlines():
        if line.startswith("## "):
            found.append((line[3:], []))
        elif step := STEP.match(line):
            found[-1][1].append(step[1])
    return found


def take(page: Page, step: str) -> None:
    """One step. Fails on words that it does not know."""
    if found := re.fullmatch(r"Open `(.+)`\.", step):
        page.goto(found[1])
    elif found := re.fullmatch(r"See “(.+)”\.", step):
        expect(page.locator("main")).to_contain_text(found[1])
    elif found := re.fullmatch(r"Type `(.+)` into \*\*(.+)\*\*\.", step):
        page.get_by_label(re.compile(f"^{re.escape(found[2])}")).locator("visible=true").fill(
            found[1]
        )
    elif found := re.fullmatch(r"Click \*\*(.+)\*\*\.", step):
        _click(page, _named(page, found[1]))
    elif step == "Click the first row.":
        _click(page, page.locator("tbody th a").first)
    elif step == "Click the first row with disk.":
        _click(page, page.locator("tbody tr:has(rect.disk) th a").first)
    else:
        raise AssertionError(f"docs/walk.md has a step that nobody can take: {step}")


def _click(page: Page, target: Locator) -> None:
    """Clicks, and waits for the page that a link or a button leads to."""
    if target.evaluate("element => element.tagName") == "SUMMARY":
        target.click()
    else:
        with page.expect_navigation():
            target.click()


def _named(page: Page, name: str) -> Locator:
    """What can be clicked and has this name."""
    exact = re.compile(rf"^\s*{re.escape(name)}\s*$")
    return page.locator("a, button, summary").filter(has_text=exact).locator("visible=true").first


def test_a_newcomer_walks_through_the_dashboard(browser, used):
    visitor = Visitor(browser, used)
    for title, steps in sections():
        assert steps, title
        for step in steps:
            try:
                take(visitor.page, step.replace("`KEY`", f"`{used.keys['ada']}`"))
            except Exception:
                visitor.shot("walk-stopped")
                raise
        visitor.shot("walk-" + title.lower().replace(" ", "-"))
    visitor.close()
    trail = used.live.get("/admin/api/audit")
    evicted = next(entry for entry in trail if entry["action"] == "cache.evict")
    assert evicted["actor"].startswith("ada (key_")
    assert evicted["after"]["disk"] > 0, "no disk was freed"
    tenant = used.live.get("/admin/api/tenants/default")
    assert 24 < float(tenant["balance"]) <= 25


def test_numbers_change_while_requests_run(visitor):
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


def test_a_week_of_a_young_server_shows_its_first_minutes(visitor):
    page = visitor.log_in()
    page.goto("/admin?window=604800")
    expect(page.locator("#state")).to_have_text(re.compile(r"^live, of \d+"))
    expect(page.locator(".legend output").first).to_have_text(re.compile(r"\d"))


@pytest.mark.parametrize("hours", [48, 168])
def test_the_axis_of_days_has_dates(visitor, hours):
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
def test_every_page_is_accessible_and_fits(browser, used, look):
    visitor = Visitor(browser, used, **LOOKS[look])
    visitor.context.add_init_script(WATCH_SHIFTS)
    page = visitor.log_in()
    deep = []  # one request and one block
    for listing in ("/admin/requests", "/admin/explorer"):
        page.goto(listing)
        deep.append(page.locator("tbody th a").first.get_attribute("href") or "")
    for path in (*LIVE, *PAGES, *deep):
        page.goto(path)
        if path in LIVE:
            live(page)
            page.wait_for_timeout(300)
            assert page.evaluate("window.shift") < MAX_SHIFT, path
        name = re.sub(r"[0-9a-f]{32}", "one", path.removeprefix("/admin").replace("/", "-"))
        visitor.shot(f"{name.strip('-') or 'overview'}-{look}")
        assert visitor.overflow() <= 0, f"{path} is too wide: {page.evaluate(WIDER)}"
        assert [] == visitor.violations(), path
    visitor.close()


@pytest.mark.parametrize("path", LIVE)
def test_a_page_is_light(browser, served, path):
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


@pytest.mark.parametrize(
    ("listing", "picture"), [("explorer", "prefixes"), ("requests", "request")]
)
def test_the_pictures_of_the_readme(browser, used, listing, picture):
    """Made at each run. PICTURES=1 puts them into docs/images."""
    visitor = Visitor(browser, used, viewport={"width": 1120, "height": 620})
    page = visitor.log_in()
    page.goto(f"/admin/{listing}")
    if listing == "requests":
        page.locator("tbody tr", has_text="diverged").locator("th a").first.click()
        page.wait_for_url("**/admin/requests/*")
    made = visitor.shot(f"picture-{picture}", full_page=False)
    if os.environ.get("PICTURES") == "1":
        shutil.copyfile(made, IMAGES / f"{picture}.png")
    assert (IMAGES / f"{picture}.png").exists()
    visitor.close()


def test_a_key_opens_the_door_and_logging_out_closes_it(visitor):
    page = visitor.page
    page.goto("/admin/cache")
    page.get_by_label("Key").fill("not the key")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("no key that opens")
    visitor.troubles.clear()  # the browser's own note of the 401
    visitor.shot("login")
    assert [] == visitor.violations()
    page.get_by_label("Key").fill(visitor.served.keys["bob"])
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Cache", exact=True)).to_be_visible()
    expect(page.get_by_text("read only")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    page.goto("/admin")
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()


def test_a_refused_form_comes_back_as_it_was_typed(visitor):
    page = visitor.log_in()
    page.goto("/admin/tenants/default")
    page.get_by_label("Amount").locator("visible=true").fill("ten")
    page.get_by_label("Why").locator("visible=true").fill("paid by bank")
    page.get_by_role("button", name="Grant").click()
    expect(page.get_by_role("alert")).to_contain_text("not an amount of money")
    visitor.troubles.clear()  # the browser's own note of the 400
    page.go_back()
    expect(page.get_by_label("Amount").locator("visible=true")).to_have_value("ten")
    expect(page.get_by_label("Why").locator("visible=true")).to_have_value("paid by bank")


def test_the_keyboard_reaches_everything(visitor, used):
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
    page.keyboard.press("g")
    page.keyboard.press("x")
    page.wait_for_url("**/admin/explorer")
    page.locator("tbody th a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/admin/explorer/*")
    page.locator("summary", has_text="Evict").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("radio", checked=True)).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Why").locator("visible=true")).to_be_focused()


def test_the_theme_is_kept_and_drawn_without_a_flash(visitor):
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


def test_all_charts_share_the_cursor(visitor):
    page = visitor.log_in()
    live(page)
    visitor.served.ask("Which badge has person 2?")
    page.wait_for_timeout(2500)
    plots = page.locator(".u-over")
    box = plots.first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 20)
    lines = page.locator(".u-cursor-x")
    places = [line.evaluate("e => e.style.transform") for line in lines.all()[:3]]
    assert 1 == len(set(places))
    assert places[0] not in ("", "translate(-10px, 0px)")


def test_a_reader_looks_and_cannot_change(browser, used):
    visitor = Visitor(browser, used)
    page = visitor.log_in("reader")
    for path in PAGES:
        page.goto(path)
        forms = page.locator("main form[method=post]")
        wanted = 1 if path == "/admin/money" else 0  # proving the ledger changes nothing
        assert wanted == forms.count(), path
    visitor.close()


def test_new_requests_appear_by_themselves(browser, used):
    visitor = Visitor(browser, used)
    page = visitor.log_in()
    page.goto("/admin/requests")
    links = page.locator("tbody th a")
    newest = links.first.get_attribute("href")
    page.evaluate("window.opened = 'once'")
    asked = used.ask("And now?")["id"].removeprefix("chatcmpl-")
    expect(links.first).to_have_attribute("href", f"/admin/requests/{asked}", timeout=15_000)
    assert newest == links.nth(1).get_attribute("href"), "an older request lost its place"
    assert "once" == page.evaluate("window.opened"), "the whole page was loaded again"
    visitor.close()
