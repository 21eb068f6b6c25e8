"""A restart while somebody looks: the same person, the same figures, on every page.

Every page is also looked at in the widths of a laptop and of a phone; pictures go to
`artifacts/dashboard`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.dashboard_server import TEXT, Served, Visitor, serving

pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.timeout(1800)]

WIDTHS = {"laptop": (1280, 800), "phone": (390, 844)}
DOCUMENTS = 4
LONG_NAME = "northwind-logistics-of-the-north-west"
# By page, what must be the same after a restart.
TABLES = {
    "/admin/requests": "#rows tr",
    "/admin/money": "main table tr",
    "/admin/tenants": "main tbody tr",
    "/admin/tenants/default": "main tbody tr",
    "/admin/keys": "main tbody tr",
}
TILES = ("/admin", "/admin/cache")
OFF_SCREEN = """[...document.querySelectorAll('main .scroll')]
  .filter(e => e.scrollWidth > e.clientWidth + 1)
  .map(e => `${e.getAttribute('aria-label')}: ${e.scrollWidth - e.clientWidth} px`)"""
# Texts that lie upon each other within one row, tile or fact.
OVERLAPS = """[...document.querySelectorAll('main :is(tr, .tile, .facts > div)')].flatMap(row => {
  const parts = [...row.children].filter(e => e.getBoundingClientRect().width);
  const meet = (a, b) => {
    const [p, q] = [a, b].map(e => e.getBoundingClientRect());
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    return across > 1 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1;
  };
  return parts.flatMap((a, i) => parts.slice(i + 1).filter(b => meet(a, b))
    .map(b => `${a.textContent.trim()} | ${b.textContent.trim()}`));
})"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restarted")


def fill(served: Served) -> None:
    """Documents of which the first is asked about often."""
    for number in range(DOCUMENTS):
        served.ask("Who is that?", system=f"{number} {TEXT}")
    for question in ("Where is he?", "How old is she?", "Why?"):
        served.ask(question, system=f"0 {TEXT}")
    served.live.post("/admin/api/tenants", {"tenant": LONG_NAME, "why": "a test"})
    limit = {"tenant": LONG_NAME, "amount": "1234.56", "per": "month"}
    served.live.post(f"/admin/api/budgets/{LONG_NAME}", limit | {"why": "a test"})
    pin = {"name": LONG_NAME, "messages": [{"role": "system", "content": f"0 {TEXT}"}]}
    why = "every conversation of its support desk begins with it"
    served.live.post("/admin/api/cache/pin", pin | {"for_s": 1e6, "why": why, "tenant": "default"})
    served.live.post("/admin/api/keys", {"tenant": LONG_NAME, "name": LONG_NAME, "why": "a test"})


def told(page: Page) -> dict[str, list[str]]:
    """What the pages say that a restart must not change."""
    found: dict[str, list[str]] = {}
    for path, rows in TABLES.items():
        page.goto(path)
        found[path] = sorted(map(_figures, page.locator(rows).all_inner_texts()))
    return found


def _figures(row: str) -> str:
    """A row without bytes by tier, which move to the disk, and times since then."""
    return re.sub(r"\t[\d.]+ [KMG]?i?B|\t–", "", row)


@pytest.fixture(scope="module")
def visits(browser: Browser, folder: Path) -> Iterator[tuple[dict[str, list[str]], Visitor]]:
    """What somebody saw before the restart, and the same browser after it."""
    with serving(folder) as served:
        fill(served)
        visitor = Visitor(browser, served)
        page = visitor.log_in()
        seen = told(page)
        page.goto("about:blank")  # nobody asks a server that is not there
    port = urlsplit(served.url).port  # a login is for one port
    with serving(folder, "--port", str(port)):
        yield seen, visitor
        visitor.close()


def test_nothing_is_lost_on_any_page(visits: tuple[dict[str, list[str]], Visitor]) -> None:
    before, visitor = visits
    after = told(visitor.page)
    assert before.keys() == after.keys()
    for name, figures in before.items():
        assert figures == after[name], name
    assert DOCUMENTS + 3 == len(after["/admin/requests"])


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_after_a_restart(
    visits: tuple[dict[str, list[str]], Visitor], width: str
) -> None:
    _, visitor = visits
    page = visitor.page
    page.set_viewport_size(dict(zip(("width", "height"), WIDTHS[width], strict=True)))
    page.goto("/admin/explorer")
    block = page.locator("tbody th a").first.get_attribute("href")
    page.goto("/admin/requests")
    request = page.locator("#rows th a").first.get_attribute("href")
    paths = ["/admin/explorer", "/admin/audit", block, request]
    paths += [f"/admin/tenants/{LONG_NAME}", "/admin/money?model=demo"]
    for path in [*TABLES, *TILES, *filter(None, paths)]:
        page.goto(path)
        name = re.sub(r"[0-9a-f]{32}", "one", re.sub(r"[/?=]", "-", path.removeprefix("/")))
        visitor.shot(f"{name}-restarted-{width}")
        assert visitor.overflow() <= 0, path
        assert [] == page.evaluate(OVERLAPS), path
        if width == "laptop":
            assert [] == page.evaluate(OFF_SCREEN), path
        if path == "/admin/keys":
            expect(page.locator("summary", has_text="Revoke").first).to_be_in_viewport()
