"""The program as a user runs it: the console script, the default model, signals, and a restart."""

import signal

import httpx
import pytest

from tests.live_server import SCRIPT, serve
from tests.patience import PATIENCE_S, ended
from tests.support.commands import told

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

DOCUMENT = " ".join(
    f"Person {number} lives in town {number * 7 % 97} and has badge {number * 7919 % 10007}."
    for number in range(24)
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def server(data_dir):
    return serve(data_dir / "serve.log", "--data-dir", data_dir, "--disk-cache", "256MiB")


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
    assert "cache.disk_bytes = 256MiB" in log, "what is not the default is told"
    assert "it/s]" not in log, "a library drew a progress bar into the log"
    assert "stopped; the tiers were flushed" in log.splitlines()[-1]

    kept = told("cache", "stats", "--data-dir", data_dir)
    assert kept["num_blocks"] >= cold["usage"]["prompt_tokens"] // 64

    with server(data_dir) as (process, url):
        after = ask(url, "Where does person 3 live?", DOCUMENT)
        assert tiers_of(after)["disk"] >= cold["usage"]["prompt_tokens"] // 64 * 64 - 64
        assert text_of(cold) == text_of(after)
        live = told("cache", "stats", "--data-dir", data_dir)
        assert str(process.pid) in live["server"]
        refused = ended(SCRIPT, "serve", "--port", "0", "--data-dir", data_dir)
        assert 1 == refused.returncode
        assert f"served by pid {process.pid}" in refused.stderr
        assert "Traceback" not in refused.stderr
        process.send_signal(signal.SIGINT)
        assert 0 == process.wait(PATIENCE_S)
