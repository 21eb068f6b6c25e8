"""Two servers on one store: prompts computed on one are hits on the other, at once where asked."""

import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.live_server import ForkedServer
from tests.redis_server import redis_server
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "prefill_decode.py"
SHARED = {"CACHESVC_CACHE__WEIGH_LOADS": "false"}
PATIENT = "?socket_timeout=60&socket_connect_timeout=60"  # a busy machine is no store that is down
STORY = "".join(f"Person {n} lives in town {n * 7 % 97}. " for n in range(8))
TALE = "".join(f"Door {n} opens with key {n * 11 % 89}. " for n in range(8))


@dataclass
class Pair:
    """A server for prompts and one for answers, on one Redis; and one that shares nothing."""

    prefill: ForkedServer
    decode: ForkedServer
    alone: ForkedServer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_model(folder / "demo")
    with ExitStack() as stack:
        url = stack.enter_context(redis_server(folder))
        servers = []
        for name, shared in (("prefill", True), ("decode", True), ("alone", False)):
            (folder / name / "data").mkdir(parents=True)
            environment = {**SHARED, "CACHESVC_CACHE__REMOTE_URL": url + PATIENT} if shared else {}
            server = ForkedServer(folder / name, folder / "demo", **environment)
            if servers:  # tenants have one salt on every machine
                shutil.copy(servers[0].data_dir / "secret", server.data_dir / "secret")
            stack.callback(server.kill)
            server.start()
            servers.append(server)
        yield Pair(*servers)


def ask(server, prompt, **more):
    body = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert 200 == answer.status_code, answer.text
    return answer


def hits(answer):
    usage = answer.json()["usage"]["prompt_tokens_details"]
    return dict(usage["cached_tokens_details"])


def text(answer):
    return str(answer.json()["choices"][0]["text"])


def test_a_prompt_computed_on_one_server_is_decoded_on_the_other(pair):
    first = ask(pair.prefill, STORY, max_tokens=1, cachesvc={"publish": True})
    published = int(first.headers["X-Cachesvc-Published-Tokens"])
    prompt_tokens = first.json()["usage"]["prompt_tokens"]
    assert prompt_tokens - 16 <= published <= prompt_tokens
    answer = ask(pair.decode, STORY)
    assert text(ask(pair.alone, STORY)) == text(answer)
    assert hits(answer)["remote"] >= published - 16 > 0


def test_the_example_prints_the_answer_of_a_server_alone(pair):
    command = [sys.executable, str(EXAMPLE), pair.prefill.url, pair.decode.url, TALE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert 0 == done.returncode, done.stderr
    assert text(ask(pair.alone, TALE, max_tokens=32)) == done.stdout.removesuffix("\n")
    assert "'remote': 0" not in done.stderr and "'remote'" in done.stderr


def test_publishing_is_refused_by_name_where_it_cannot_be(pair):
    refused = httpx.post(
        f"{pair.alone.url}/v1/completions",
        json={"model": "demo", "prompt": "x", "cachesvc": {"publish": True}},
        timeout=120,
    )
    assert (400, "cachesvc.publish") == (refused.status_code, refused.json()["error"]["param"])
    two = httpx.post(
        f"{pair.prefill.url}/v1/completions",
        json={"model": "demo", "prompt": ["x", "y"], "cachesvc": {"publish": True}},
        timeout=120,
    )
    assert 400 == two.status_code
