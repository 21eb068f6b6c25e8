"""A real server, watched: by a real Prometheus with our boards and rules, by a router that reads
its block events over ZeroMQ, and by a client of its event stream.
"""

import json
import math
import signal
import subprocess
import time
from contextlib import closing

import httpx
import msgspec
import pytest
import yaml
import zmq

from tests.live_clients import completion
from tests.live_server import serve
from tests.patience import PATIENCE_S, ended, free_port, installed, until, until_ready
from tests.support.models import save_tiny_model
from tests.unit.test_ops import BOARDS, OPS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

WINDOW = "10s"  # in place of Grafana's $__rate_interval
# What a healthy server with these requests and no quota does not have: these panels show nothing.
EMPTY = {
    *("Checkpoints of recurrent states", "Engines at URLs"),
    *("Faults", "Invariant violations", "Quotas"),
}
ENDS = {"endpoint": "events", "replay_endpoint": "replay"}
SIZES = ["--device-cache", "2MiB", "--host-cache", "2MiB", "--disk-cache", "8MiB"]


class Prometheus:
    """The HTTP API of a running one."""

    def __init__(self, url):
        self.url = url

    def get(self, path, **query):
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=query, timeout=PATIENCE_S)
        assert 200 == answer.status_code, f"{query or path}: {answer.text}"
        return answer.json()["data"]

    def values(self, expr):
        """What the expression is now, over all series."""
        found = self.get("query", query=expr)["result"]
        return [float(series["value"][1]) for series in found]


def panels():
    """Each title and expression, as Grafana sends it when every server is chosen."""
    for board in BOARDS:
        for panel in json.loads(board.read_text())["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", WINDOW)
                yield panel["title"], expr.replace("$instance", ".*")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def server(folder):
    """A real server of a tiny model, whose tiers are so small that they evict."""
    installed("prometheus")
    save_tiny_model(folder / "model")
    ends = {name: f"ipc://{folder}/{end}" for name, end in ENDS.items()}
    arguments = ("--model", folder / "model", "--block-size", "16", *SIZES)
    environment = {"CACHESVC_CACHE__WEIGH_LOADS": "false", "CACHESVC_EVENTS__ZMQ": json.dumps(ends)}
    log = folder / "serve.log"
    with serve(log, *arguments, "--data-dir", folder / "data", **environment) as (process, url):
        yield url
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(PATIENCE_S), log.read_text()


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
    url, log = f"http://127.0.0.1:{free_port()}", folder / "prometheus.log"
    options = [f"--web.listen-address={url.removeprefix('http://')}", "--log.level=warn"]
    options += [f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with log.open("w") as out:
        process = subprocess.Popen([installed("prometheus"), *options], stdout=out, stderr=out)
    try:
        ready = f"{url}/-/ready"
        until_ready(lambda: httpx.get(ready).raise_for_status(), process, log, httpx.HTTPError)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def watched(server, prometheus):
    """After requests that hit, miss and evict, and some scrapes."""
    until(lambda: prometheus.values("up") == [1.0])
    model = httpx.get(f"{server}/v1/models").json()["data"][0]["id"]
    for number in range(60):
        text = f"{number % 20} is the number of this prompt, which is long enough. " * 8
        completion(server, model, text, max_tokens=4)
    until(lambda: prometheus.values("sum(cachesvc_requests_total)") == [60.0])
    time.sleep(2.5)  # a rate needs some scrapes, and the rules their turn
    return prometheus


def replayed(endpoint):
    """Every event that a publisher has told, asked for as vLLM's subscribers do."""
    with closing(zmq.Context.instance().socket(zmq.DEALER)) as asking:
        asking.connect(endpoint)
        asking.send_multipart((b"", bytes(8)))
        events = []
        while asking.poll(10_000) and (payload := asking.recv_multipart()[-1]):
            events += msgspec.msgpack.decode(payload)[1]
        assert not payload, "the replay does not end"
        return events


def test_a_router_knows_how_many_blocks_each_tier_holds(watched, folder):
    held = {"GPU": set(), "CPU": set(), "DISK": set()}
    for event in replayed(f"ipc://{folder}/replay"):
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
    empty = {title for title, expr in panels() if not watched.values(expr)}
    assert EMPTY >= empty


def test_the_boards_tell_what_happened(watched):
    def one(expr):
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
    file = OPS / "prometheus" / "prometheus.yml"
    checked = ended(installed("promtool"), "check", "config", file)
    assert checked.returncode == 0, checked.stderr
