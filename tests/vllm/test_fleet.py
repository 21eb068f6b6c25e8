"""A fleet as teams run it: two `vllm serve` over one node and one Redis, vllm-router before them,
and two of our servers before that, with one ledger in PostgreSQL. A hundred conversations; in the
middle, one vLLM is killed.
"""

import json
import re
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from billing.gate.entries import Kind
from billing.store.opening import open_store
from tests.live_server import SCRIPT, ForkedServer
from tests.patience import PATIENCE_S, ended, free_port, until
from tests.postgres_server import fresh_database
from tests.redis_server import redis_server
from tests.support.billing import booked
from tests.vllm.processes import PYTHON, RunningNode, Serving, connector, until_healthy

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.postgres, pytest.mark.timeout(1800)]

NUM_CONVERSATIONS = 100
AT_ONCE = 8
TOKENS_OF_A_CHECK = 3  # read and generated: a completion, one with a priority, one by a grammar
OPENING = " ".join(f"Person {n} lives in town {n * 7 % 97}." for n in range(30))


class Server(ForkedServer):
    """Ours, before the router. Its ledger is the PostgreSQL that the environment names."""

    sizes = ()  # the engine's, and so are the tiers

    @property
    def ledger_url(self):
        return self._environment["CACHESVC_BILLING__DATABASE_URL"]

    def store(self):
        return open_store(self.ledger_url)


@contextmanager
def router(engines, log):
    port = free_port()
    command = [PYTHON.with_name("vllm-router"), "--port", str(port), "--disable-retries"]
    workers = ["--policy", "cache_aware", "--worker-urls", *(each.url for each in engines)]
    health = ["--health-check-interval-secs", "2", "--health-failure-threshold", "1"]
    metrics = ["--prometheus-port", str(free_port())]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *health, *metrics, *workers], stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        until_healthy(url, process, log)
        yield url
    finally:
        process.kill()
        process.wait()


class Conversations:
    """What clients asked, and what they were told. A client tries again, as client libraries do."""

    def __init__(self, servers, model, key):
        self._servers, self._model, self._key = servers, model, key
        self.acknowledged = {}
        self.num_failed = 0

    def hold(self, number):
        told = f"{OPENING} I am guest {number}."
        for turn in range(2):
            answer = self._ask(told, self._servers[(number + turn) % len(self._servers)])
            told += answer + f" And then? ({turn})"

    def _ask(self, prompt, server):
        body = {"model": self._model, "prompt": prompt, "temperature": 0, "max_tokens": 6}
        give_up = time.monotonic() + PATIENCE_S
        while True:
            url, key = f"{server.url}/v1/completions", dict(self._key)
            response = httpx.post(url, json=body, headers=key, timeout=PATIENCE_S)
            if response.status_code == 200:
                break
            assert response.status_code >= 500, response.text
            assert time.monotonic() < give_up, response.text
            self.num_failed += 1
            time.sleep(0.2)
        told = response.json()
        usage = told["usage"]
        hits = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {"hit": hits, "miss": usage["prompt_tokens"] - hits}
        counts["output"] = usage["completion_tokens"]
        request = response.headers["x-request-id"]
        assert request not in self.acknowledged
        self.acknowledged[request] = Counter(counts)
        return str(told["choices"][0]["text"])

    def hold_all(self, numbers):
        """The sums of what these were told, while nobody else asks."""
        before = set(self.acknowledged)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self.hold, numbers))
        new = self.acknowledged.keys() - before
        return sum((self.acknowledged[each] for each in new), Counter())


def counted(engines):
    """What vLLM says that it has computed, found and generated."""
    sums = Counter()
    for engine in engines:
        told = engine.counters()
        hits = told["vllm:prefix_cache_hits_total"] + told["vllm:external_prefix_cache_hits_total"]
        sums["hit"] += int(hits)
        sums["miss"] += int(told["vllm:prompt_tokens_total"] - hits)
        sums["output"] += int(told["vllm:generation_tokens_total"])
    return sums


def ready(server):
    return 200 == httpx.get(f"{server.url}/health/ready", timeout=PATIENCE_S).status_code


def checks(servers):
    """How often they asked the engine what it is, and found it."""
    return sum(server.log.count("; it serves ") for server in servers)


def charged(server):
    """What the ledger has, by request. Each once."""
    found = {}
    for entry in booked(server.ledger_url):
        if entry.kind is Kind.CHARGE:
            assert entry.request_id not in found
            usage = entry.details.get("usage", {})  # a request that failed has none
            hits = sum(tokens for name, tokens in usage.items() if name.startswith("hit_"))
            found[entry.request_id] = Counter(
                hit=hits, miss=usage.get("miss", 0), output=usage.get("output", 0)
            )
    return found


def test_a_fleet_bills_each_answer_once_while_an_engine_is_killed(model, tmp_path, postgres):
    with ExitStack() as stack:
        database = stack.enter_context(fresh_database(postgres))
        store = stack.enter_context(redis_server(tmp_path))
        node = RunningNode(tmp_path, more=("--remote-url", store))
        node.start()
        stack.callback(node.kill)
        options = {"max_model_len": 1024, "max_num_seqs": AT_ONCE, "scheduling_policy": "priority"}
        options["kv_transfer_config"] = json.dumps(connector(node.socket))
        options["kv_cache_memory_bytes"] = 256 << 20
        engines = [Serving(model, tmp_path / f"vllm-{n}.log", **options) for n in range(2)]
        for engine in engines:
            stack.callback(engine.kill)
        for engine in engines:
            engine.wait()
        url = stack.enter_context(router(engines, tmp_path / "router.log"))
        servers = []
        for name in ("one", "two"):
            server = Server(
                tmp_path / name,
                model,
                CACHESVC_BILLING__DATABASE_URL=database,
                CACHESVC_BILLING__SERVER_NAME=name,
            )
            server.more = ("--engine", url)
            server.data_dir.mkdir(parents=True)
            stack.callback(server.kill)
            servers.append(server)
        one, two = servers
        key = one.customer("acme", 10**15)
        one.start()
        for name in ("secret", "receipt_key"):
            (two.data_dir / name).write_bytes((one.data_dir / name).read_bytes())
        two.start()
        guests = Conversations(servers, model.name, key)

        # All is well: what answers said is what vLLM counted.
        before = counted(engines)
        told = guests.hold_all(range(40))
        assert told["hit"] > told["miss"]
        assert counted(engines) - before == told
        assert 0 == guests.num_failed

        # One engine is killed while conversations run. Each goes on.
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(guests.hold_all, range(40, 70))
            until(lambda: len(guests.acknowledged) >= 2 * 40 + 15)
            engines[0].kill()
            held.result()
        assert 2 * 70 == len(guests.acknowledged)

        # The other serves the rest, and counts the same as we do, with our checks of who is back.
        until(lambda: all(map(ready, servers)))
        before, num_checks = counted(engines[1:]), checks(servers)
        told = guests.hold_all(range(70, NUM_CONVERSATIONS))
        until(lambda: all(map(ready, servers)))
        computed = TOKENS_OF_A_CHECK * (checks(servers) - num_checks)
        assert counted(engines[1:]) - before == told + Counter(miss=computed, output=computed)

        # Every answer is on the ledger once, with what it said. What failed costs nothing.
        assert 2 * NUM_CONVERSATIONS == len(guests.acknowledged)
        until(lambda: guests.acknowledged.keys() <= charged(one).keys())
        found = charged(one)
        assert guests.acknowledged == {each: found[each] for each in guests.acknowledged}
        failed = [found[each] for each in found.keys() - guests.acknowledged.keys()]
        assert [] == [each for each in failed if each.total()], guests.num_failed
        assert dashboard(one) == dashboard(two)


def dashboard(server):
    """The usage of all tenants as a server's dashboard has it."""
    done = ended(SCRIPT, "admin", "link", "--data-dir", server.data_dir, check=True)
    link = re.search(r"http://\S+", done.stdout)
    assert link is not None, done.stdout
    with httpx.Client(follow_redirects=True, timeout=PATIENCE_S) as browser:
        browser.get(link[0])
        shown = browser.get(f"{server.url}/admin/api/usage")
    assert 200 == shown.status_code, shown.text
    return shown.json()
