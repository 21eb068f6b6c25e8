"""`vllm serve` as our child: it starts or says why not, and never outlives us. A stand-in runs."""

import os
import queue
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from cachesvc.server.vllm import child as module
from cachesvc.server.vllm.child import VllmChild
from engine.errors import ModelError
from tests.patience import PATIENCE_S, until

SERVER = "tests.support.listening"
KEEPER = f"""
import sys, time
from pathlib import Path
from cachesvc.server.vllm import child
child._SERVER = {SERVER!r}
running = child.VllmChild(Path(sys.argv[1]), [], exact=False)
running.start()
print(running._process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(module, "_SERVER", SERVER)


def group_of(leader: int) -> list[str]:
    """The processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z":
            found.append(stat.parent.name)
    return sorted(found, key=int)


def until_gone(leader: int) -> None:
    until(lambda: not group_of(leader))


def test_it_listens_once_started_and_ends_with_its_workers(tmp_path):
    with closing(VllmChild(tmp_path / "s", [], exact=False)) as child:
        child.start()
        leader = child._process.pid
        assert 3 == len(group_of(leader)), "a keeper, the server and its worker"
    until_gone(leader)
    assert not (tmp_path / "s").exists()


def test_what_it_refuses_is_said(tmp_path):
    with (
        closing(VllmChild(tmp_path / "s", ["--wrong"], exact=False)) as child,
        pytest.raises(ModelError, match=r"did not start: .*unrecognized arguments: --wrong"),
    ):
        child.start()


def test_its_end_is_told_and_its_workers_end(tmp_path):
    told: queue.Queue[BaseException] = queue.Queue()
    with closing(VllmChild(tmp_path / "s", [], exact=False)) as child:
        child.start()
        child.on_end(told.put)
        leader = child._process.pid
        os.kill(int(group_of(leader)[1]), signal.SIGKILL)
        assert "vLLM has ended with 137" in str(told.get(timeout=PATIENCE_S))
        until_gone(leader)
    assert told.empty()


def test_it_ends_with_a_server_that_was_killed(tmp_path):
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, tmp_path / "s"], stdout=subprocess.PIPE, text=True
    )
    with keeper.stdout:
        leader = int(keeper.stdout.readline())
        assert 3 == len(group_of(leader)), "a keeper, the server and its worker"
        keeper.kill()
        keeper.wait()
        until_gone(leader)
