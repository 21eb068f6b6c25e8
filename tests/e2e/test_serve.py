"""The program as a user runs it: the console script, the default model, signals, and a restart."""

import json
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.live_server import SCRIPT, serve
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

DOCUMENT = " ".join(
    f"Person {number} lives in town {number * 7 % 97} and has badge {number * 7919 % 10007}."
    for number in range(24)
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def server(data_dir, write_policy="on_evict"):
    policy = {"CACHESVC_CACHE__WRITE_POLICY": write_policy}
    sizes = ("--data-dir", data_dir, "--disk-cache", "256MiB")
    return serve(data_dir / "serve.log", *sizes, **policy)


def ask(url, question, system=""):
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    body = {"model": "smollm2-135m", "messages": messages, "max_tokens": 12, "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert 200 == response.status_code, response.text
    answer = response.json()
    usage = answer["usage"]
    hits, misses = usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"]
    assert usage["prompt_tokens"] == hits + misses
    details = usage["prompt_tokens_details"]
    assert hits == details["cached_tokens"] == sum(details["cached_tokens_details"].values())
    return answer


def told(*arguments):
    done = subprocess.run(
        [SCRIPT, *map(str, arguments), "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def tiers_of(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]


def test_hits_come_from_the_device_then_after_a_restart_from_disk(data_dir):
    with server(data_dir) as (process, url):
        assert "Paris" in text_of(ask(url, "What is the capital of France?"))
        cold = ask(url, "Where does person 3 live?", DOCUMENT)
        again = ask(url, "Where does person 3 live?", DOCUMENT)
        assert tiers_of(cold)["device"] < 64
        assert tiers_of(again)["device"] == again["usage"]["prompt_tokens"] - 1
        assert text_of(cold) == text_of(again)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(PATIENCE_S)
    log = (data_dir / "serve.log").read_text()
    assert "it/s]" not in log, "a library drew a progress bar into the log"
    assert "stopped; the tiers were flushed" in log.splitlines()[-1]

    kept = told("cache", "stats", "--data-dir", data_dir)
    assert kept["clean"]
    assert kept["num_blocks"] >= cold["usage"]["prompt_tokens"] // 64

    with server(data_dir) as (process, url):
        after = ask(url, "Where does person 3 live?", DOCUMENT)
        assert tiers_of(after)["disk"] >= cold["usage"]["prompt_tokens"] // 64 * 64 - 64
        assert text_of(cold) == text_of(after)
        live = told("cache", "stats", "--data-dir", data_dir)
        assert str(process.pid) in live["server"]
        refused = subprocess.run(
            [SCRIPT, "serve", "--port", "0", "--data-dir", data_dir],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert 1 == refused.returncode
        assert f"served by pid {process.pid}" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_after_a_kill_within_writes_nothing_corrupt_is_served_and_answers_are_right(data_dir):
    """Blocks are written as they fill; the kill comes while a prompt's are on their way."""
    question = "Which badge has person 5?"
    with server(data_dir, "write_through") as (process, url):
        before = ask(url, question, DOCUMENT)
    for number in range(2):
        with server(data_dir, "write_through") as (process, url), ThreadPoolExecutor(1) as pool:
            held = told_blocks(data_dir)
            lost = pool.submit(ask, url, question, f"Edition {number}. {DOCUMENT}")
            wait_for_blocks(data_dir, more_than=held, lost=lost)
            process.kill()
            process.wait()
            lost.exception(timeout=60)
        assert told("cache", "verify", "--data-dir", data_dir)["sound"]
    with server(data_dir) as (process, url):
        after = ask(url, question, DOCUMENT)
        assert text_of(before) == text_of(after)
        assert tiers_of(after)["disk"] > 0
        process.send_signal(signal.SIGINT)
        assert 0 == process.wait(PATIENCE_S)


def told_blocks(data_dir):
    return told("cache", "stats", "--data-dir", data_dir)["num_blocks"]


def wait_for_blocks(data_dir, *, more_than, lost):
    """Until the first block of the running prompt is on disk, or its request has ended."""
    for _ in range(200):
        if lost.done() or told_blocks(data_dir) > more_than:
            return
        time.sleep(0.01)
