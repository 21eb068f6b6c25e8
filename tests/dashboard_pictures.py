"""The pictures in docs/images, taken of a real server under some traffic: `make pictures`."""

import base64
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from tests.dashboard_server import TEXT, Served, Visitor, chromium, serving

FOLDER = Path(__file__).parents[1] / "docs" / "images"
TRAFFIC_S = 240.0
WINDOW = "?window=300"
SHOTS: dict[str, tuple[str, dict[str, Any]]] = {
    "overview-light": ("/admin" + WINDOW, {}),
    "overview-dark": ("/admin" + WINDOW, {"color_scheme": "dark"}),
    "cache-dark": ("/admin/cache" + WINDOW, {"color_scheme": "dark"}),
}


def make_traffic(served: Served, seconds: float, seed: int = 1) -> None:
    """Questions about documents, a few of them asked about far more often than the rest."""
    source, ends = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < ends:
        document = int(source.paretovariate(0.35)) % 400
        served.ask(
            f"Question {source.randrange(50)}?",
            system=f"Document {document}. {TEXT}",
            max_tokens=source.randrange(4, 30),
        )
        time.sleep(source.expovariate(1.5))


def take(browser: Browser, served: Served, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (path, look) in SHOTS.items():
        visitor = Visitor(browser, served, viewport={"width": 1240, "height": 860}, **look)
        page = visitor.log_in()
        page.goto(path)
        page.wait_for_timeout(2500)
        (folder / f"dashboard-{name}.webp").write_bytes(packed(browser, page.screenshot()))
        visitor.close()


def packed(browser: Browser, picture: bytes) -> bytes:
    """A PNG as WebP, a fifth of its size; the browser knows how."""
    context = browser.new_context()
    script = """async (source) => {
        const image = new Image();
        image.src = source;
        await image.decode();
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [image.width, image.height];
        canvas.getContext("2d").drawImage(image, 0, 0);
        return canvas.toDataURL("image/webp", 0.82);
    }"""
    source = "data:image/png;base64," + base64.b64encode(picture).decode()
    told: str = context.new_page().evaluate(script, source)
    context.close()
    return base64.b64decode(told.partition(",")[2])


def main(folder: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as data,
        serving(Path(data), "--disk-cache", "16MiB") as served,
    ):
        make_traffic(served, TRAFFIC_S)
        with chromium() as browser:
            take(browser, served, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
