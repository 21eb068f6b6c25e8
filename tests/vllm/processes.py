"""A real vLLM engine and a real node, each in a process of its own, for tests and benches."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tiers.node.client import NodeClient

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


def connector(node: Path) -> dict[str, Any]:
    """What tells vLLM to keep its blocks in a node."""
    return {
        "kv_connector": "CachesvcConnector",
        "kv_connector_module_path": "cachesvc.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": str(node)},
    }


class Engine:
    """A vLLM engine in a process of its own, with more of vLLM's options. Without `core_apart` its
    core is in the same process, which starts in half the time."""

    def __init__(
        self,
        model: Path,
        node: Path | None,
        log: Path,
        python: Path = PYTHON,
        *,
        core_apart: bool = True,
        **options: Any,
    ) -> None:
        self.log = log
        stderr = log.open("wb")
        told = ({"kv_transfer_config": connector(node)} if node else {}) | options
        self.process = subprocess.Popen(
            [python, ROOT / "tests" / "vllm" / "driver.py", model, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "2",
                "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(core_apart)),
            },
            start_new_session=True,
        )
        stderr.close()
        self._read()

    def tell(self, do: str, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-4000:]
        return json.loads(line)

    def generate(
        self, *prompts: Sequence[int], salt: str | None = None, max_tokens: int = 12
    ) -> list[dict[str, Any]]:
        ids = [list(prompt) for prompt in prompts]
        self.tell("generate", prompts=ids, salt=salt, max_tokens=max_tokens)
        answers: list[dict[str, Any]] = self._read()
        return answers

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; its blocks may still be on their way to the node."""
        for _ in range(100):
            self.tell("reset")
            if self._read():
                return
            time.sleep(0.1)
        raise AssertionError("vLLM did not give its blocks back")

    def kill(self) -> None:
        """kill -9, its workers included: none of them may clean up."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class RunningNode:
    """`cachesvc node` as an operator starts it."""

    def __init__(
        self,
        folder: Path,
        *,
        socket: Path | None = None,
        disk: Path | None = None,
        more: Sequence[str] = (),
    ) -> None:
        self.more = more
        self.socket = socket or folder / "node.sock"
        self.disk = disk or folder / "disk"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, host: str = "512MiB", disk: str = "2GiB") -> None:
        self._process = subprocess.Popen(
            [
                *(Path(sys.executable).with_name("cachesvc"), "node", "--socket", self.socket),
                *("--host-cache", host, "--disk-cache-dir", self.disk, "--disk-cache", disk),
                *self.more,
            ],
            cwd=ROOT,
        )
        for _ in range(600):
            if self.socket.exists():
                return
            time.sleep(0.1)
        raise AssertionError("the node did not start")

    def stats(self) -> dict[str, Any]:
        with closing(NodeClient(self.socket)) as client:
            client.open()
            return client.stats()

    def pool(self) -> dict[str, Any]:
        (pool,) = self.stats()["pools"]
        return dict(pool)

    def until_on_disk(self) -> None:
        while any(pool["is_writing"] for pool in self.stats()["pools"]):
            time.sleep(0.05)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)
        self.socket.unlink(missing_ok=True)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None
