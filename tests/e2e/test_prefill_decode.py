"""Two servers on one store: prompts computed on one are hits on the other, at once where asked."""

import re
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.live_clients import completed, hits_of
from tests.live_server import ForkedServer
from tests.patience import ended
from tests.redis_server import redis_server
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "prefill_decode.py"
SHARED = {"CACHESVC_CACHE__WEIGH_LOADS": "false"}
PATIENT = "?socket_timeout=60&socket_connect_timeout=60"  # a busy machine is no store that is down
STORY = "".join(f"Person {n} lives in town {n * 7 % 97}. " for n in range(8))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The URLs of a server for prompts and one for answers, on one Redis."""
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_model(folder / "demo")
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder)) + PATIENT
        servers = []
        for name in ("prefill", "decode"):
            (folder / name / "data").mkdir(parents=True)
            environment = {**SHARED, "CACHESVC_CACHE__REMOTE_URL": redis}
            server = ForkedServer(folder / name, folder / "demo", **environment)
            if servers:  # tenants have one salt on every machine
                shutil.copy(servers[0].data_dir / "secret", server.data_dir / "secret")
            stack.callback(server.kill)
            server.start()
            servers.append(server)
        yield [server.url for server in servers]


def test_the_example_decodes_on_one_server_what_the_other_computed(pair):
    prefill, decode = pair
    done = ended(sys.executable, EXAMPLE, prefill, decode, STORY)
    assert 0 == done.returncode, done.stderr
    alone = completed(decode, "demo", STORY, max_tokens=32, cachesvc={"cache": False})
    assert alone["choices"][0]["text"] == done.stdout.removesuffix("\n")
    assert 0 == sum(hits_of(alone).values())
    prompt_tokens = alone["usage"]["prompt_tokens"]
    published, remote = map(int, re.findall(r"^(\d+) tokens.*'remote': (\d+)", done.stderr)[0])
    assert prompt_tokens - 16 <= published <= prompt_tokens
    assert remote >= published - 16 > 0


def test_publishing_more_than_one_prompt_is_refused(pair):
    body = {"model": "demo", "prompt": ["x", "y"], "cachesvc": {"publish": True}}
    answer = httpx.post(f"{pair[0]}/v1/completions", json=body, timeout=120)
    assert (400, "cachesvc.publish") == (answer.status_code, answer.json()["error"]["param"])
