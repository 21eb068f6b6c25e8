"""A server whose disks are named by flags: all of them hold blocks, and all serve after a stop."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live_server import ForkedServer
from tests.support.models import save_tiny_model
from tiers.disk.directory import read_meta

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPTS = [f"Person {n} lives in town {n * 7 % 97}. " * 6 for n in range(8)]


class TwoMoreDisks(ForkedServer):
    """`--disk-cache-dir` is given twice."""

    @property
    def folders(self) -> list[Path]:
        return [self.data_dir.parent / name for name in ("second", "third")]

    def command(self) -> list[Any]:
        more = [part for folder in self.folders for part in ("--disk-cache-dir", folder)]
        return [*super().command(), *more, "--kv-dtype", "float32"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TwoMoreDisks]:
    save_tiny_model(tmp_path / "demo")
    running = TwoMoreDisks(tmp_path, tmp_path / "demo")
    try:
        yield running
    finally:
        running.kill()


def ask(server: ForkedServer, prompt: str) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt came from disk."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert 200 == answer.status_code, answer.text
    told = answer.json()
    details = told["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    return str(told["choices"][0]["text"]), int(details["disk"])


def test_blocks_are_spread_over_every_disk_that_a_flag_names(server: TwoMoreDisks) -> None:
    server.start()
    before = [ask(server, prompt)[0] for prompt in PROMPTS]
    server.stop()
    counts = []
    for folder in (server.data_dir / "disk", *server.folders):
        meta = read_meta(folder)
        assert meta is not None, f"{folder} is no disk tier"
        counts.append(meta.num_blocks)
    assert all(counts), counts
    server.start()
    after = [ask(server, prompt) for prompt in PROMPTS]
    assert before == [text for text, _ in after]
    assert after[0][1], "the first load is always worth it, for no rate is known yet"
