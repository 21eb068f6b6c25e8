"""The walks of the docs, as they are printed: quickstart.md, relay.md, sell.md and replicas.md."""

import json
import os
import re
import shlex
import signal
import sys
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path

import httpx
import pytest
from redis import Redis

from tests.live_server import SCRIPT, serve
from tests.patience import PATIENCE_S, ended, free_port
from tests.postgres_server import fresh_database
from tests.redis_server import redis_server
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SERVE = "$ cachesvc serve &"


def page(name):
    return (ROOT / "docs" / name).read_text()


def ran(*command, **options):
    """What a program prints, with its errors and its exit code."""
    done = ended(*command, **options)
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
        used = ran(SCRIPT, "usage", "--data-dir", data_dir, "--json").stdout
        total = json.dumps(json.loads(used))
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


@pytest.mark.redis
@pytest.mark.postgres
def test_three_replicas_share_blocks_and_a_ledger_that_outlives_one_of_them(postgres, tmp_path):
    save_tiny_model(tmp_path / "tiny")
    blocks = re.findall(r"```console\n(.*?)```", page("replicas.md"), re.S)
    script = re.sub(r"^[$>] ", "", "".join(blocks), flags=re.M)
    with ExitStack() as stack:
        here = {
            "postgresql+psycopg://cachesvc@127.0.0.1/cachesvc": stack.enter_context(
                fresh_database(postgres)
            ),
            **{str(port): str(free_port()) for port in (8001, 8002, 8003)},
            "smollm2-135m": "tiny",
        }
        for number in range(2):
            folder = tmp_path / f"redis-{number}"
            folder.mkdir()
            url = stack.enter_context(redis_server(folder))
            here[f"redis://127.0.0.1:6379/{number}"] = url
        for written, meant in here.items():
            assert written in script, written
            script = script.replace(written, meant)
        told = {"MODEL__NAME": "tiny", "CACHE__WEIGH_LOADS": "false", "CACHE__BLOCK_SIZE": "16"}
        told |= {"CACHE__DEVICE_BYTES": "8MiB", "CACHE__HOST_BYTES": "8MiB"}
        told |= {"CACHE__DISK_BYTES": "64MiB", "LIMITS__TENANTS": '{"acme": {"requests": 1000}}'}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= {f"CACHESVC_{name}": value for name, value in told.items()}
        environment["PATH"] = f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"
        script = f"set -e\ntrap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n{script}"
        script += "cachesvc usage --tenant acme --json\n"
        done = ran("bash", "-c", script, cwd=tmp_path, env=environment, timeout=10 * PATIENCE_S)
        with Redis.from_url(here["redis://127.0.0.1:6379/0"]) as limits:
            counted = limits.info("commandstats")["cmdstat_incrby"]["calls"]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"id"')]
    details = [each["usage"]["prompt_tokens_details"] for each in answers]
    remote = [each["cached_tokens_details"].get("remote", 0) for each in details]
    assert remote[0] == 0 < min(remote[1:3]) and 4 == len(remote), remote
    assert 1 == len({each["choices"][0]["text"] for each in answers})
    [row] = json.loads(done.stdout[done.stdout.rindex("\n[") :])
    assert (4, sum(remote)) == (row["requests"], row["hit_remote_tokens"])
    assert "proved: " in done.stderr
    assert 4 == counted, "each request by the one count of all servers"
