"""A real server to look at, and a headless Chromium to look with, for the tests of the dashboard.

The server is `cachesvc serve` on a tiny model that answers in milliseconds, with small tiers.
Without Chromium the tests are skipped, and fail with CI=true.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from cachesvc.server.server_file import LiveServer, find_server
from tests.live_server import ForkedServer
from tests.patience import installed
from tests.support.models import save_tiny_model

MODEL = "demo"
ARTIFACTS = Path(__file__).parents[1] / "artifacts" / "dashboard"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--force-color-profile=srgb")
SMALL = ("--device-cache", "1MiB", "--host-cache", "1MiB", "--disk-cache", "64MiB")
SIZES = {"narrow": (320, 720), "wide": (1440, 900)}
TEXT = " ".join(
    f"Person {number} lives in town {number * 7 % 97} and has badge {number * 7919 % 10007}."
    for number in range(6)
)


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, and the operator's way of speaking with it."""

    url: str
    data_dir: Path
    live: LiveServer
    keys: dict[str, str]  # of Ada, who changes things, and of Bob, who looks

    def ask(self, question, *, system=TEXT, max_tokens=8):
        """One chat completion, as a client sends it."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, "messages": messages}
        headers = {"Authorization": f"Bearer {self.keys['ada']}"}
        url = f"{self.url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=120).raise_for_status().json()

    def link(self, role="admin"):
        """A URL that logs in once."""
        path = self.live.post(f"/admin/api/links?role={role}")["path"]
        return self.url + path


@contextmanager
def serving(folder, *arguments):
    """`cachesvc serve` on `folder`, until the block ends. It evicts much: its tiers are small."""
    save_tiny_model(folder / MODEL)
    server = ForkedServer(folder, folder / MODEL)
    server.data_dir, server.more = folder, (*SMALL, *arguments)
    try:
        url = server.start()
        live = find_server(folder)
        assert live is not None, server.log
        keys = {
            name: live.post(
                "/admin/api/keys",
                {"tenant": "default", "name": name, "scopes": [scope], "why": "to log in"},
            )["key"]
            for name, scope in (("ada", "admin"), ("bob", "read"))
        }
        yield Served(url, folder, live, keys)
    finally:
        if server.runs:
            server.stop()


@contextmanager
def chromium():
    """Debian's Chromium, headless."""
    path = installed("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """A person with a browser: pages of one context, and what went wrong in them."""

    def __init__(self, browser, served, **options):
        options = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"} | options
        self.served = served
        self.context = browser.new_context(base_url=served.url, **options)
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        self.troubles = []
        self.page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        self.page.on("console", self._listen)

    def log_in(self, role="admin"):
        """By a one-time link; ends on the overview."""
        self.page.goto(self.served.link(role))
        self.page.wait_for_url("**/admin")
        return self.page

    def shot(self, name, *, full_page=True):
        """A picture for people, kept with CI's artefacts."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        path.write_bytes(self.page.screenshot(full_page=full_page))
        return path

    def overflow(self):
        """Pixels by which the page is wider than the window."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return self.page.evaluate(script)

    def violations(self, *, but=()):
        """What axe-core finds serious or critical, and landmarks of one name: `rule: element`."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{rule['id']}: {node['target']}"
            for rule in found
            if (rule["impact"] in ("serious", "critical") or rule["id"] == "landmark-unique")
            and rule["id"] not in but
            for node in rule["nodes"]
        ]

    def close(self):
        """Ends the visit. Nothing may have gone wrong unseen."""
        self.context.close()
        assert [] == self.troubles

    def _listen(self, message):
        if message.type in ("error", "warning"):
            self.troubles.append(f"{message.type}: {message.text}")
