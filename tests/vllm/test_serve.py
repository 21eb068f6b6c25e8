"""`cachesvc serve --engine vllm`: two tenants, every tier, a client that leaves, a bill that fits.

One story over two starts of the server, for vLLM takes half a minute to start. The node that the
first start makes outlives it.
"""

import json
import os
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.live_server import LiveServer
from tests.patience import PATIENCE_S, ended, until
from tests.redis_server import redis_server
from tests.support.billing import charges_of
from tests.vllm.processes import PYTHON, ROOT, RunningNode
from tiers.node.client import NodeClient
from tiers.node.messages import described_layout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BLOCK = 128
CLASSES = ("hit_device", "hit_host", "hit_disk", "hit_remote", "miss", "output")
RUN = "import sys; sys.argv[0] = 'cachesvc'; from cachesvc.cli import main; main()"
STORY = " ".join(f"Person {n} lives in town {n * 7 % 97}." for n in range(60))
SHARED = " ".join(f"Letter {n} goes to house {n * 13 % 83}." for n in range(60))
PATIENT = "?socket_timeout=60&socket_connect_timeout=60"  # a busy machine is no store that is down
OTHER = " ".join(f"Badge {n} opens door {n * 31 % 89}." for n in range(60))


class VllmServer(LiveServer):
    """A server whose engine is vLLM, in vLLM's environment."""

    def command(self):
        options = ["--engine", "vllm", "--port", "0", "--data-dir", self.data_dir]
        sizes = ["--device-cache", "512MiB", "--host-cache", "256MiB", "--disk-cache", "1GiB"]
        vllm = ["--vllm.max-model-len=2048", "--vllm.enforce-eager", "--max-running", "8"]
        model = ["--model", self._model.name]
        return [PYTHON, "-c", RUN, "serve", *options, *sizes, *vllm, *model]

    def body(self, prompt):
        return {"model": self._model.name, "prompt": prompt, "temperature": 0, "max_tokens": 6}

    @property
    def remote_url(self):
        return self._environment["CACHESVC_CACHE__REMOTE_URL"]

    @property
    def socket(self):
        return self.data_dir / "node.sock"

    def node(self):
        with closing(NodeClient(self.socket)) as client:
            client.open()
            return client.stats()

    def pool(self):
        (pool,) = self.node()["pools"]
        return dict(pool)

    def entries(self):
        """The charges. Fails once the server has ended: nobody would book what is waited for."""
        assert self.runs, self.log
        with closing(self.store()) as store:
            return [entry for tenant in ("a", "b") for entry in charges_of(store, tenant)]


class Client:
    """One tenant's questions, and what their answers said was used."""

    def __init__(self, server, key):
        self._server = server
        self._key = key
        self.used = Counter()

    def ask(self, prompt, **more):
        body = {**self._server.body(prompt), **more}
        url = f"{self._server.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=self._key, timeout=PATIENCE_S)
        assert 200 == answer.status_code, answer.text
        self.last = answer.json()
        self.headers = answer.headers
        return self.last["choices"][0]["text"], self._note(self.last["usage"])

    def stream(self, prompt, *, leave_after=None, **more):
        """The text and its usage; None where the client has left."""
        body = {**self._server.body(prompt), "stream": True, **more}
        body["stream_options"] = {"include_usage": True}
        url = f"{self._server.url}/v1/completions"
        text, usage, num_chunks = "", None, 0
        with httpx.stream("POST", url, json=body, headers=self._key, timeout=PATIENCE_S) as answer:
            assert 200 == answer.status_code, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
                num_chunks += bool(chunk["choices"])
                if num_chunks == leave_after:
                    return None
        return text, self._note(usage)

    def _note(self, usage):
        split = usage["prompt_tokens_details"]["cached_tokens_details"]
        told = Counter({f"hit_{tier}": tokens for tier, tokens in split.items()})
        told["output"] = usage["completion_tokens"]
        told["miss"] = usage["prompt_tokens"] - sum(split.values())
        self.used += told
        return told


@pytest.fixture
def server(model, tmp_path):
    with redis_server(tmp_path) as url:
        told = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        told |= {"CACHESVC_CACHE__REMOTE_URL": url + PATIENT}
        told |= {"CACHESVC_CACHE__QUOTAS": '{"a": "300MiB"}'}
        running = VllmServer(tmp_path, model, **told)
        try:
            yield running
        finally:
            running.kill()
            stop_node(running)


def stop_node(server):
    if server.socket.exists():
        with closing(NodeClient(server.socket)) as client:
            client.open()
            os.kill(client.peer, signal.SIGTERM)
        until(lambda: not server.socket.exists())


def test_a_server_over_vllm_bills_by_tier_what_it_served(server, tmp_path):
    keys = {name: server.customer(name, 10**13) for name in ("a", "b")}
    server.start()
    a, b = (Client(server, keys[name]) for name in ("a", "b"))

    # The same prompt: computed, then from vLLM's own cache, with the same answer. Its blocks are
    # counted for their tenant as they come into the node.
    cold, used = a.ask(STORY)
    until(lambda: server.pool()["num_blocks"] >= 5)
    quotas = {(each["tier"], each["group"]): each for each in server.node()["groups"]}
    block_bytes = described_layout(server.pool()["layout"]).nbytes
    assert quotas["host", "tenant:a"]["used_bytes"] >= 5 * block_bytes
    assert used["miss"] > 5 * BLOCK and not used["hit_device"]
    warm, used = a.stream(STORY)
    assert cold == warm
    assert used["hit_device"] >= 5 * BLOCK and used["miss"] < BLOCK

    # Another tenant shares nothing of it.
    other, used = b.ask(STORY)
    assert cold == other
    assert used["miss"] > 5 * BLOCK and not used["hit_device"]

    # What vLLM is told of a request, and what is refused.
    text, _ = a.ask("Yes or no? ", structured_outputs={"regex": "(yes|no), (yes|no)"})
    assert text in {f"{x}, {y}"[: len(text)] for x in ("yes", "no") for y in ("yes", "no")}
    a.ask("Tell me", n=3, temperature=1, seed=5, logprobs=2, stop=[" never"])
    first = [choice["text"] for choice in a.last["choices"]]
    assert all(len(c["logprobs"]["tokens"]) for c in a.last["choices"])
    a.ask("Tell me", n=3, temperature=1, seed=5, logprobs=2, stop=[" never"])
    assert first == [choice["text"] for choice in a.last["choices"]]
    url, wrong = f"{server.url}/v1/completions", server.body("x") | {"temperature": 999}
    refused = httpx.post(url, json=wrong, headers=keys["a"], timeout=PATIENCE_S)
    assert (400, "temperature") == (refused.status_code, refused.json()["error"]["param"])

    # A prompt is computed for whoever shares the store: its blocks are there with the answer.
    shared, _ = a.ask(SHARED, cachesvc={"publish": True})
    assert int(a.headers["X-Cachesvc-Published-Tokens"]) >= 5 * BLOCK

    # A client leaves in the middle: what it was given is charged.
    assert b.stream(OTHER, leave_after=2, max_tokens=1200) is None
    until(lambda: any(e.details["outcome"] == "client_gone" for e in server.entries()))
    (left,) = (e for e in server.entries() if e.details["outcome"] == "client_gone")
    assert 2 <= left.details["usage"]["output"] < 1200

    # The server stops; its node stays, and the next server finds the blocks in its memory.
    until(lambda: server.pool()["stored"] >= 10 and not server.pool()["is_writing"])
    server.stop()
    assert server.socket.exists()
    server.start()
    again, used = a.ask(STORY)
    assert cold == again
    assert used["hit_host"] >= 5 * BLOCK and not used["hit_device"]

    # The node is restarted: from its disk.
    until(lambda: not server.pool()["is_writing"])
    stop_node(server)
    remote, disk = ("--remote-url", server.remote_url), server.data_dir / "disk" / "node"
    node = RunningNode(tmp_path, socket=server.socket, disk=disk, more=remote)
    node.start("256MiB")
    try:
        again, used = b.ask(STORY)
        assert cold == again
        assert used["hit_disk"] >= 5 * BLOCK and not used["hit_device"]

        # A node on another machine, whose disk has nothing: from the store that they share.
        node.stop()
        node.disk = tmp_path / "empty"
        node.start("256MiB")
        again, used = a.ask(SHARED)
        assert shared == again
        assert used["hit_remote"] >= 5 * BLOCK and not used["hit_device"]

        # A tenant's blocks are purged from everywhere, and the other's stay.
        b.ask(STORY)
        until(lambda: not server.pool()["is_writing"])
        receipt = server.told("cache", "purge", "--tenant", "a", "--reason", "asked for", "--yes")
        assert 0 == receipt["blocks_left"] < receipt["tiers"]["host"]["blocks"]
        assert receipt["tiers"]["disk"]["blocks"] >= 5
        again, used = a.ask(SHARED)
        assert shared == again
        assert used["miss"] > 5 * BLOCK, "neither vLLM's own cache nor the store has them"
        assert 0 < server.pool()["num_blocks"]

        # The bill is what the answers said, and the ledger adds up.
        billed = Counter()
        charges = server.entries()
        for entry in charges:
            if entry.details["outcome"] != "client_gone":
                billed.update({c: entry.details["usage"].get(c, 0) for c in CLASSES})
        assert +(a.used + b.used) == +billed
        assert server.told("ledger", "verify")["ok"]
        # vLLM's engine core dies: the server ends, for its supervisor to start it again.
        os.kill(core_of(server.pid), signal.SIGKILL)
        assert 0 != server.wait()
        assert "the engine has failed" in server.log
    finally:
        node.stop()


def core_of(pid):
    """vLLM's engine core: it calls itself so, in the session of a child of the server."""
    found = {}
    for child in Path("/proc").glob("[0-9]*"):
        try:
            _, parent, _, session = (child / "stat").read_text().rpartition(")")[2].split()[:4]
            name = (child / "cmdline").read_bytes()
        except OSError:
            continue
        found[int(child.name)] = int(parent), int(session), b"EngineCore" in name
    for each, (_, session, is_core) in found.items():
        if is_core and session in found and found[session][0] == pid:
            return each
    raise AssertionError("no engine core runs")


def test_equal_bits_are_refused_on_a_cpu_where_vllm_would_fail_at_the_first_request(
    model, tmp_path
):
    options = ["--engine", "vllm", "--port", "0", "--data-dir", tmp_path, "--model", model]
    more = {"PYTHONPATH": str(ROOT), "CACHESVC_MODEL__EXACT": "always"}
    done = ended(PYTHON, "-c", RUN, "serve", *options, env={**os.environ, **more})
    assert done.returncode != 0
    assert "vLLM has no batch-invariant kernels for a CPU" in done.stderr, done.stderr
