"""The walk of docs/relay.md: a second server before one that runs, two questions, the bill."""

import json
import re
import shlex
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import READY, SCRIPT
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PAGE = (Path(__file__).parents[2] / "docs/relay.md").read_text()


def test_what_the_inner_server_had_cached_is_billed_as_a_hit(default_server, tmp_path):
    [serve] = re.findall(r"\$ cachesvc (serve --engine \S+ --model \S+)", PAGE)
    [question] = re.findall(r"chat/completions -d '(\{.*?\})'", PAGE, re.DOTALL)
    command = shlex.split(serve.replace("http://127.0.0.1:8100", default_server))
    log, data_dir = tmp_path / "serve.log", tmp_path / "outer"
    with log.open("w") as out:
        process = subprocess.Popen(
            [SCRIPT, *command, "--port", "0", "--data-dir", data_dir], stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := READY.search(log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        assert "requests pass to" in log.read_text()
        for _ in range(2):
            answer = httpx.post(
                f"{found[1]}/v1/chat/completions",
                json=json.loads(" ".join(question.split())),
                timeout=PATIENCE_S,
            )
            assert 200 == answer.status_code, answer.text
        told = answer.json()["usage"]
        assert told["prompt_tokens_details"]["cached_tokens"] > 0
        shown = subprocess.run(
            [SCRIPT, "usage", "--data-dir", data_dir, "--json"],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        ).stdout
        total = json.dumps(json.loads(shown))
        assert '"requests": 2' in total, total
        hits = sum(map(int, re.findall(r'"hit_\w+": (\d+)', total)))
        assert hits >= told["prompt_cache_hit_tokens"], total
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
