"""The first walk of docs/walk.md, click by click, and the pages of data for all who may look.

The page is the script: each numbered line is one step, done in a real browser.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from api.admin.login.passwords import Passwords
from api.admin.login.sessions import Role
from tests.dashboard_server import TEXT, Served, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.timeout(1800)]

DOCS = Path(__file__).parents[2] / "docs"
WALK, IMAGES = DOCS / "walk.md", DOCS / "images"
STEP = re.compile(r"^\d+\. (.+)$")
PASSWORD = "a long enough password"
PAGES = ("explorer", "requests", "money", "tenants", "tenants/default", "keys", "audit")
WIDER = """[...document.querySelectorAll('main *')]
  .filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth)
  .map(e => `${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`)"""
NUM_PROMPTS = 12  # more than the memory tiers hold, so that some lie on disk


@pytest.fixture(scope="module")
def used(served: Served) -> Served:
    """The server after a day: prompts on disk, and at last one that parts from its twin."""
    for number in range(NUM_PROMPTS):
        served.ask("Who is that?", system=f"{number} {TEXT}")
    served.ask("Who is new?", system=f"You help. Today is Monday. {TEXT}")
    served.ask("Who is new?", system=f"You help. Today is Friday. {TEXT}")
    return served


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


def test_a_newcomer_walks_through_the_dashboard(browser: Browser, used: Served) -> None:
    Passwords(used.data_dir).set("admin", PASSWORD, Role.ADMIN)
    visitor = Visitor(browser, used)
    for title, steps in sections():
        assert steps, title
        for step in steps:
            try:
                take(visitor.page, step)
            except Exception:
                visitor.shot("walk-stopped")
                raise
        visitor.shot("walk-" + title.lower().replace(" ", "-"))
    visitor.close()
    trail = used.live.get("/admin/api/audit")
    evicted = next(entry for entry in trail if entry["action"] == "cache.evict")
    assert "admin" == evicted["actor"] and evicted["after"]["disk"] > 0, "no disk was freed"
    tenant = used.live.get("/admin/api/tenants/default")
    assert 24 < float(tenant["balance"]) <= 25


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible_and_fit_a_phone(browser: Browser, used: Served, scheme: str) -> None:
    visitor = Visitor(browser, used, color_scheme=scheme)
    page = visitor.log_in()
    for path in (*PAGES, *_deep_pages(page)):
        page.set_viewport_size({"width": 1440, "height": 900})
        page.goto(path if path.startswith("/") else f"/admin/{path}")
        assert [] == visitor.violations(), path
        name = re.sub(r"[0-9a-f]{32}", "one", path.removeprefix("/admin/").replace("/", "-"))
        visitor.shot(f"{name}-{scheme}")
        page.set_viewport_size({"width": 320, "height": 720})
        assert visitor.overflow() <= 0, f"{path} is wider than a phone: {page.evaluate(WIDER)}"
        visitor.shot(f"{name}-{scheme}-narrow")
    visitor.close()


@pytest.mark.parametrize(
    ("listing", "picture"), [("explorer", "prefixes"), ("requests", "request")]
)
def test_the_pictures_of_the_readme(
    browser: Browser, used: Served, listing: str, picture: str
) -> None:
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


def _deep_pages(page: Page) -> list[str]:
    """One request and one block."""
    deep = []
    for listing in ("requests", "explorer"):
        page.goto(f"/admin/{listing}")
        target = page.locator("tbody th a").first.get_attribute("href")
        assert target is not None
        deep.append(target)
    return deep


def test_a_keyboard_is_enough(browser: Browser, used: Served) -> None:
    visitor = Visitor(browser, used)
    page = visitor.log_in()
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
    visitor.close()


def test_a_reader_looks_and_cannot_change(browser: Browser, used: Served) -> None:
    visitor = Visitor(browser, used)
    page = visitor.log_in("reader")
    for path in PAGES:
        page.goto(f"/admin/{path}")
        forms = page.locator("main form[method=post]")
        wanted = 1 if path == "money" else 0  # proving the ledger changes nothing
        assert wanted == forms.count(), path
    visitor.close()


def test_new_requests_appear_by_themselves(browser: Browser, used: Served) -> None:
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
