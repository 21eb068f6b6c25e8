"""What the dashboard costs the server: CPU time of its process, idle and with a page open.

`python -m tests.bench.dashboard [SECONDS]` prints JSON. The estimate: a poll is a request of 1 ms
every 2 s, 0.05 % of a core; a sample of 300 numbers each second 0.5 ms, as much again.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page

from tests.dashboard_server import Served, Visitor, chromium, serving

SECONDS = 20.0
TICKS = 100  # of /proc's clock, a second


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def share(served: Served, page: Page | None, seconds: float) -> float:
    """Per cent of one core that the server took."""
    before, started = cpu_s(served.live.pid), time.monotonic()
    if page is not None:
        page.wait_for_timeout(seconds * 1000)
    else:
        time.sleep(seconds)
    return 100 * (cpu_s(served.live.pid) - before) / (time.monotonic() - started)


def main(seconds: float) -> None:
    told: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as served:
        for number in range(4):
            served.ask(f"Where does person {number} live?")
        time.sleep(3)
        told["no page"] = share(served, None, seconds)
        with chromium() as browser:
            for path in ("/admin", "/admin/cache", "/admin/working-set"):
                visitor = Visitor(browser, served)
                visitor.log_in()
                visitor.page.goto(path)
                visitor.page.wait_for_timeout(3000)
                told[path] = share(served, visitor.page, seconds) - told["no page"]
                visitor.close()
    print(json.dumps({name: round(value, 2) for name, value in told.items()}, indent=1))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
