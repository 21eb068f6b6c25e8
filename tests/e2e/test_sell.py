"""docs/sell.md, typed as it is printed."""

import json
import os
import re
import signal
import subprocess
from decimal import Decimal
from pathlib import Path

import pytest

from tests.e2e.test_serve import SCRIPT, wait_for_url
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PAGE = (Path(__file__).parents[2] / "docs" / "sell.md").read_text()
SERVE = "$ cachesvc serve &"


@pytest.fixture
def served(tmp_path):
    """The environment of the shell, and the server that the page starts in it."""
    path = f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CACHESVC_SERVER__DATA_DIR": str(tmp_path / "data")}
    log = tmp_path / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [SCRIPT, "serve", "--port", "0"], stdout=out, stderr=out, env=environment
        )
    try:
        yield environment | {"URL": wait_for_url(process, log)}
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()


def test_a_customer_pays_in_euros_what_the_card_says(served, tmp_path):
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.S)
    assert SERVE in "".join(blocks)
    script = "".join(blocks).replace(SERVE, "").replace("http://127.0.0.1:8000", served["URL"])
    script = "set -e\n" + re.sub(r"^[$>] ", "", script, flags=re.M)
    done = subprocess.run(
        ["bash", "-c", script + "\ncachesvc usage --tenant acme --json\n"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=served,
        timeout=PATIENCE_S,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "no objection" in done.stderr and "euro 2026-11 is applied" in done.stderr
    [row] = json.loads(done.stdout[done.stdout.rindex("\n[") :])
    hits, misses, output = (row[f"{name}_tokens"] for name in ("hit_device", "miss", "output"))
    assert (2, "EUR") == (row["requests"], row["currency"]) and hits > 600
    cost = (2 * hits + 20 * misses + 80 * output) * Decimal("1e-8")
    assert (cost, 10 - cost) == (Decimal(row["amount"]), Decimal(balance_in(done.stdout)))
    assert '"input_cache_read":"0.00000005"' in done.stdout
    assert f"revenue {row['amount']} EUR" in done.stderr and "proved: " in done.stderr


def balance_in(printed: str) -> str:
    return re.findall(r'"total_balance":"([\d.]+)"', printed)[0]
