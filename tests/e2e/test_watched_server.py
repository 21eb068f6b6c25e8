"""A real server, watched: by a real Prometheus with our boards and rules, by a router that reads
its block events over ZeroMQ, and by a client of its event stream.
"""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml
import zmq

from tests.live_server import serve
from tests.patience import PATIENCE_S
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

OPS = Path(__file__).parents[2] / "ops"
WINDOW = "10s"  # in place of Grafana's $__rate_interval
# What a healthy server with these requests and no quota does not have: these panels show nothing.
EMPTY = {
    *("Checkpoints of recurrent states", "Engines at URLs"),
    *("Faults", "Invariant violations", "Quotas"),
}
ENDS = {"endpoint": "events", "replay_endpoint": "replay"}
SIZES = ["--device-cache", "2MiB", "--host-cache", "2MiB", "--disk-cache", "8MiB"]


class Panel(NamedTuple):
    board: str
    title: str
    expr: str


class Prometheus:
    """The HTTP API of a running one."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str) -> Any:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=PATIENCE_S) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query or path}: {error.read().decode()}") from None

    def values(self, expr: str) -> list[float]:
        """What the expression is now, over all series; raises what Prometheus says against it."""
        found = self.get("query", query=expr)["result"]
        return [float(series["value"][1]) for series in found]


def panels() -> list[Panel]:
    found = []
    for board in sorted((OPS / "k8s" / "components" / "monitoring" / "boards").glob("*.json")):
        for panel in json.loads(board.read_text())["panels"]:
            found += [
                Panel(board.stem, panel["title"], target["expr"]) for target in panel["targets"]
            ]
    return found


def chosen(expr: str) -> str:
    """The expression as Grafana sends it when every server is chosen."""
    return expr.replace("$__rate_interval", WINDOW).replace("$instance", ".*")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def server(folder):
    """A real server of a tiny model, whose tiers are so small that they evict."""
    program()
    save_tiny_model(folder / "model")
    ends = {name: f"ipc://{folder}/{end}" for name, end in ENDS.items()}
    arguments = ("--model", folder / "model", "--block-size", "16", *SIZES)
    environment = {"CACHESVC_CACHE__WEIGH_LOADS": "false", "CACHESVC_EVENTS__ZMQ": json.dumps(ends)}
    log = folder / "serve.log"
    with serve(log, *arguments, "--data-dir", folder / "data", **environment) as (process, url):
        yield url
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(PATIENCE_S), log.read_text()


def program() -> str:
    found = shutil.which("prometheus")
    if found is None:
        reason = "no prometheus in PATH; Debian's package of that name has it"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def prometheus(folder, server):
    """One that scrapes the server every half second, with the rules that are shipped."""
    config = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(OPS / "prometheus" / "rules.yml")]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [server.removeprefix("http://")]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    with running(path, folder) as url:
        yield Prometheus(url)


@contextmanager
def running(config: Path, folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    options += [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    log = folder / "prometheus.log"
    with log.open("w") as out:
        process = subprocess.Popen([program(), *options], stdout=out, stderr=out)
    try:
        wait(lambda: process.poll() is not None or answers(f"http://127.0.0.1:{port}/-/ready"))
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def watched(server, prometheus):
    """After requests that hit, miss and evict, and some scrapes."""
    wait(lambda: prometheus.values("up") == [1.0])
    for number in range(60):
        person = number % 20
        ask(server, f"{person} is the number of this prompt, which is long enough. " * 8)
    wait(lambda: prometheus.values("sum(cachesvc_requests_total)") == [60.0])
    time.sleep(2.5)  # a rate needs some scrapes, and the rules their turn
    return prometheus


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


def wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ask(url: str, prompt: str) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S) as response:
        body["model"] = json.load(response)["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).close()


def replayed(folder: Path) -> list[dict[str, Any]]:
    """Every event that the server has published, asked for as vLLM's subscribers do."""
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    try:
        asking.connect(f"ipc://{folder}/replay")
        asking.send_multipart((b"", (0).to_bytes(8, "big")))
        events = []
        while asking.poll(10_000):
            *_, payload = asking.recv_multipart()
            if not payload:
                return events
            events += msgspec.msgpack.decode(payload)[1]
        raise AssertionError("the replay does not end")
    finally:
        context.destroy(linger=0)


def test_a_router_knows_how_many_blocks_each_tier_holds(watched, folder):
    held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "DISK": set()}
    for event in replayed(folder):
        if event["type"] == "BlockStored":
            held[event["medium"]] |= set(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            held[event["medium"]] -= set(event["block_hashes"])
    for medium, tier in (("CPU", "host"), ("DISK", "disk")):
        (blocks,) = watched.values(f'cachesvc_cache_blocks{{tier="{tier}"}}')
        assert len(held[medium]) == blocks > 0, tier
    # Of the device, `cachesvc_cache_blocks` counts the partly filled blocks too, which have no key.
    (blocks,) = watched.values('cachesvc_cache_blocks{tier="device"}')
    assert 0 < len(held["GPU"]) <= blocks


def test_the_server_is_scraped_whole(watched):
    (target,) = watched.get("targets")["activeTargets"]
    assert ("up", "") == (target["health"], target["lastError"])


def test_every_panel_is_answered(watched):
    """Each expression is one that Prometheus takes, and has something to draw."""
    empty = {panel.title for panel in panels() if not watched.values(chosen(panel.expr))}
    assert EMPTY >= empty


def test_the_boards_tell_what_happened(watched):
    def one(expr: str) -> float:
        (value,) = watched.values(expr)
        return value

    assert 60 == one('sum(cachesvc_requests_total{finish=~"stop|length"})')
    hit = one('sum(cachesvc_prompt_tokens_total{source!="computed"})')
    assert 0 < hit < one("sum(cachesvc_prompt_tokens_total)")
    assert one('sum(cachesvc_evictions_total{tier="device", cause="room"})') > 0
    assert one("sum(cachesvc_block_lifetime_seconds_count)") == one("sum(cachesvc_evictions_total)")
    assert one('sum(cachesvc_transfer_bytes_total{from="device", to="host"})') > 0
    assert one("sum(cachesvc_billed_units_total)") > 0
    assert 0 == one("cachesvc_ledger_drift_units")


def test_every_rule_is_evaluated_and_no_alert_fires(watched):
    groups = watched.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    written = yaml.safe_load((OPS / "prometheus" / "rules.yml").read_text())["groups"]
    assert len(rules) == sum(len(group["rules"]) for group in written)
    assert [] == [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"]
    assert [] == [rule["name"] for rule in rules if rule.get("state") == "firing"]
    for rule in rules:
        if rule["type"] == "recording":
            values = watched.values(rule["name"])
            assert values and not any(map(math.isnan, values)), rule["name"]


def test_the_shipped_scrape_configuration_is_correct():
    program()
    checked = subprocess.run(
        ["promtool", "check", "config", OPS / "prometheus" / "prometheus.yml"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr
