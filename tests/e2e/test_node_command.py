"""`cachesvc node` as an operator runs it alone: scraped, heard by a router, with quotas."""

import json
import os
import signal
import subprocess
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from engine.operators.library import BUILT, find_compiler
from tests.e2e.test_watched_server import replayed
from tests.live_server import SCRIPT
from tests.patience import PATIENCE_S, free_port, until
from tests.support.commands import call
from tests.unit.test_node_socket import ROOT, joined, prompt, write

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


class Running:
    """A node that is ready, and the events of its log so far."""

    def __init__(self, process):
        self.process = process
        self._said = []
        self.until_said("node ready")

    def until_said(self, event):
        """Reads its log until it has this event."""
        assert self.process.stderr is not None
        while not any(event in said for said in self._said):
            line = self.process.stderr.readline()
            assert line, f"it ended and said {self._said}"
            self._said.append(json.loads(line)["event"])


@contextmanager
def node(folder, *more, **environment):
    told = ["--socket", folder / "node.sock", "--host-cache", "1MiB", *more]
    env = {**os.environ, **environment}
    process = subprocess.Popen([SCRIPT, "node", *told], stderr=subprocess.PIPE, text=True, env=env)
    try:
        yield Running(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
        assert 0 == process.returncode


def scraped(address):
    """Values by name and labels' values."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


def test_a_node_is_scraped_and_heard_and_keeps_quotas(tmp_path):
    metrics, events = (f"127.0.0.1:{free_port()}" for _ in range(2))
    router = zmq.Context.instance().socket(zmq.SUB)
    router.setsockopt(zmq.SUBSCRIBE, b"kv-events")
    router.connect(f"tcp://{events}")
    replay = f"tcp://127.0.0.1:{free_port()}"
    table = json.dumps({"endpoint": f"tcp://{events}", "replay_endpoint": replay})
    more = ("--metrics", metrics, "--events", table, "--quota", "acme=256KiB")
    with closing(router), node(tmp_path, *more), joined(tmp_path / "node.sock") as client:
        client.know({ROOT: "tenant:acme"})
        number, stored = 0, []
        while not stored:  # a subscriber that came late has missed what was told before
            number += 1
            write(client, prompt(number))
            while router.poll(100):
                found = msgspec.msgpack.decode(router.recv_multipart()[2])[1]
                stored += [each for each in found if each["type"] == "BlockStored"]
        told = stored[0]
        assert ("CPU", 4, 12) == (told["medium"], told["block_size"], len(told["token_ids"]))
        told_of = [one for one in replayed(replay) if one["type"] == "BlockStored"]
        blocks = {each for one in told_of for each in one["block_hashes"]}
        assert 3 * number == len(blocks), "a router that joins now hears of all"
        values = scraped(metrics)
        assert 3 * number == values["cachesvc_cache_blocks", "host"]
        assert 1 << 20 == values["cachesvc_cache_capacity_bytes", "host"]
        assert 3 * number * 8192 == values["cachesvc_quota_used_bytes", "tenant:acme", "host"]
        assert 256 << 10 == values["cachesvc_quota_share_bytes", "tenant:acme", "host"]
        assert values["process_resident_memory_bytes",] > 0


@pytest.mark.skipif(find_compiler() is None, reason="this machine has no C++ compiler")
def test_a_node_with_a_disk_expands_records_by_a_compiled_library(tmp_path):
    """By its environment's, or by one that it keeps; the first node ends while it is compiled."""
    disk = ("--disk-cache-dir", str(tmp_path / "disk"))
    with node(tmp_path, *disk):
        pass
    for _ in range(2):
        with node(tmp_path, *disk) as running:
            maps = Path(f"/proc/{running.process.pid}/maps")
            until(lambda maps=maps: "/operators-" in maps.read_text())
        kept = len(list((tmp_path / "disk" / "models").glob("operators-*.so")))
        assert kept == (not list(BUILT.glob("operators-*.so")))


def test_a_node_without_the_library_says_why(tmp_path):
    disk = ("--disk-cache-dir", str(tmp_path / "disk"))
    with node(tmp_path, *disk, ATEN_CPU_CAPABILITY="default") as running:
        running.until_said("no compiled operators: torch computes with DEFAULT instructions")


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (("--quota", "acme"), "write NAME=SIZE"),
        (("--quota", "acme=2TiB"), "promise"),
        (("--quota", "acme=lots"), "is not a size"),
        (("--metrics", "9464"), "is not an address"),
        (("--host-cache", "lots"), "is not a size"),
        (("--host-cache", "0"), "write it like 4GiB"),
        (("--host-cache", "4"), "write it with its unit"),
        (("--socket", "/dev/null/node.sock"), "name another folder with --socket"),
        (("--events", '{"replay_endpoint": "tcp://127.0.0.1:1"}'), "endpoint: Field required"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, told, says):
    ended = call("node", "--socket", tmp_path / "node.sock", *told, env={"COLUMNS": "200"})
    assert 0 != ended.exit_code and says in ended.stderr
    assert not (tmp_path / "node.sock").exists()
