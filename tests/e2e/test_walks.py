"""The walks of the docs, as they are printed: quickstart.md, relay.md and sell.md."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import httpx
import pytest

from tests.live_server import SCRIPT, serve
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SERVE = "$ cachesvc serve &"


def page(name):
    return (ROOT / "docs" / name).read_text()


def ran(*command, **options):
    """What a program prints, with its errors and its exit code."""
    about = {"capture_output": True, "text": True, "timeout": PATIENCE_S, "check": False}
    done = subprocess.run(command, **about | options)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done


def test_the_second_question_finds_the_document(default_server):
    [program] = re.findall(r"```python\n(.*?)```", page("quickstart.md"), re.S)
    program = program.replace("http://127.0.0.1:8000", default_server)
    printed = ran(sys.executable, "-c", program, cwd=ROOT).stdout
    cached, tokens = re.findall(r"(\d+) of (\d+) tokens were cached", printed)[-1]
    assert int(cached) > 2000
    assert int(cached) > 0.9 * int(tokens)


def test_what_the_inner_server_had_cached_is_billed_as_a_hit(default_server, tmp_path):
    """A second server before one that runs, two questions, the bill."""
    [command] = re.findall(r"\$ cachesvc serve (--engine \S+ --model \S+)", page("relay.md"))
    [question] = re.findall(r"chat/completions -d '(\{.*?\})'", page("relay.md"), re.DOTALL)
    engine = shlex.split(command.replace("http://127.0.0.1:8100", default_server))
    log, data_dir = tmp_path / "serve.log", tmp_path / "outer"
    with serve(log, *engine, "--data-dir", data_dir) as (_, url):
        assert "requests pass to" in log.read_text()
        body = json.loads(" ".join(question.split()))
        for _ in range(2):
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
            assert 200 == answer.status_code, answer.text
        told = answer.json()["usage"]
        assert told["prompt_tokens_details"]["cached_tokens"] > 0
        total = json.dumps(
            json.loads(ran(SCRIPT, "usage", "--data-dir", data_dir, "--json").stdout)
        )
        assert '"requests": 2' in total, total
        hits = sum(map(int, re.findall(r'"hit_\w+": (\d+)', total)))
        assert hits >= told["prompt_cache_hit_tokens"], total


@pytest.fixture
def served(tmp_path):
    """The environment of the shell, and the server that the page starts in it."""
    path = f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CACHESVC_SERVER__DATA_DIR": str(tmp_path / "data")}
    with serve(tmp_path / "serve.log", **environment) as (process, url):
        yield environment | {"URL": url}
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(PATIENCE_S)


def test_a_customer_pays_in_euros_what_the_card_says(served, tmp_path):
    blocks = re.findall(r"```console\n(.*?)```", page("sell.md"), re.S)
    assert SERVE in "".join(blocks)
    script = "".join(blocks).replace(SERVE, "").replace("http://127.0.0.1:8000", served["URL"])
    script = "set -e\n" + re.sub(r"^[$>] ", "", script, flags=re.M)
    script += "\ncachesvc usage --tenant acme --json\n"
    done = ran("bash", "-c", script, cwd=tmp_path, env=served)
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
