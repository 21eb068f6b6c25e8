"""A real vLLM engine and a real node, each in a process of its own, for tests and benches."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import httpx

from engine.remote.metrics import counters_in
from tests.live_server import room_in
from tests.patience import PATIENCE_S, free_port, until, until_ready
from tiers.node.client import NodeClient

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
NEXT = ROOT / ".venv-vllm" / "next"  # the next version's classes; see `tests.vllm.next`
DRIVER = Path(__file__).with_name("driver.py")


def environment(num_threads, *, core_apart, first=()):
    paths = [*map(str, first), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(core_apart)),
    }


def connector(node, **more):
    """What tells vLLM to keep its blocks in a node."""
    return {
        "kv_connector": "CachesvcConnector",
        "kv_connector_module_path": "cachesvc.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": str(node), **more},
    }


class Forks:
    """A process that has imported vLLM, and forks engines. Their core is in the same process, with
    one thread: two engines side by side have two processors, and threads that spin."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [PYTHON, DRIVER, "forks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=environment(1, core_apart=False),
            )

    def start(self, arguments, *files):
        """The process id of an engine with these as its input, output and errors."""
        numbers = [file.fileno() for file in files]
        socket.send_fds(self._socket, [json.dumps(arguments).encode()], numbers)
        return int(self._socket.recv(32))

    def close(self):
        self._socket.close()
        self._process.wait()


class Engine:
    """A vLLM engine in a process of its own, with more of vLLM's options. Without `forks` its core
    is in another process, as in service, and it takes four times as long to start."""

    def __init__(self, model, node, log, python=PYTHON, *, forks=None, weigh_loads=True, **options):
        self.log = log
        ours = {"kv_transfer_config": connector(node, weigh_loads=weigh_loads)} if node else {}
        told = ours | options
        arguments = [str(model), json.dumps(told)]
        (asks, self._asks), (self._answers, answers) = pipe(), pipe()
        self._process = None
        with asks, answers, log.open("wb") as errors:
            if forks is not None:
                self._pid = forks.start(arguments, asks, answers, errors)
            else:
                files = {"stdin": asks, "stdout": answers, "stderr": errors}
                about = {"cwd": ROOT, "env": environment(2, core_apart=True)}
                command = [python, DRIVER, *arguments]
                self._process = subprocess.Popen(command, **files, **about, start_new_session=True)
                self._pid = self._process.pid
        self._read()

    def tell(self, do, **what):
        self._asks.write(json.dumps({"do": do, **what}) + "\n")
        self._asks.flush()

    def _read(self):
        line = self._answers.readline()
        assert line, self.log.read_text()[-4000:]
        return json.loads(line)

    def generate(self, *prompts, salt=None, max_tokens=12):
        """For each prompt its tokens, their logprobs, and the tokens that were hits."""
        ids = [list(prompt) for prompt in prompts]
        self.tell("generate", prompts=ids, salt=salt, max_tokens=max_tokens)
        return self._read()

    def forget(self, **more):
        """Empty vLLM's own prefix cache; its blocks may still be on their way to the node."""
        until(lambda: self.tell("reset", **more) or self._read())

    def kill(self):
        """kill -9, its workers included: none of them may clean up."""
        if self._answers.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with self._answers:
            self._answers.read()  # until all have ended
        with suppress(BrokenPipeError):
            self._asks.close()
        if self._process is not None:
            self._process.wait()


def until_healthy(url, process, log):
    until_ready(
        lambda: httpx.get(f"{url}/health", timeout=5).raise_for_status(),
        *(process, log, httpx.HTTPError),
    )


class Serving:
    """`vllm serve`, as an operator starts it, with these options and flags."""

    usual = ("--enforce-eager", "--enable-prompt-tokens-details")

    def __init__(self, model, log, *flags, env=None, **options):
        port = free_port()
        self.url, self._log = f"http://127.0.0.1:{port}", log
        told = {"model": model, "served-model-name": model.name, "port": port, "dtype": "float32"}
        named = [f"--{name.replace('_', '-')}={value}" for name, value in (told | options).items()]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *named, *self.usual, *flags],
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
                start_new_session=True,
            )

    def wait(self):
        until_healthy(self.url, self._process, self._log)

    def counters(self):
        return counters_in(httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text)

    def kill(self):
        """kill -9, its workers included."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def pipe():
    """What is read of it, and what is written to."""
    read, write = os.pipe()
    return os.fdopen(read), os.fdopen(write, "w")


class Offloading:
    """A process of vLLM's environment, or of the next version's classes in it; see
    `tests.vllm.offload`."""

    def __init__(self, log: Path, classes: str = "installed") -> None:
        self.log, self.classes = log, classes
        with log.open("wb") as errors:
            env = environment(1, core_apart=False, first=[NEXT] if classes == "next" else [])
            files = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            command = [PYTHON, "-m", "tests.vllm.offload"]
            self._process = subprocess.Popen(command, **files, cwd=ROOT, env=env, text=True)

    def __call__(self, do, **asked):
        self.tell(do, **asked)
        for line in self._process.stdout:
            if line.startswith("> "):
                return json.loads(line[2:])
        raise AssertionError(self.log.read_text()[-4000:])

    def tell(self, do, **asked):
        self._process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
        self._process.stdin.flush()

    def ended(self):
        return self._process.wait(60)

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class RunningNode:
    """`cachesvc node` as an operator starts it."""

    def __init__(self, folder, *, socket=None, disk=None, more=()):
        self.more = more
        self.socket = socket or folder / "node.sock"
        self.disk = disk or folder / "disk"
        self._process = None

    def start(self, host="512MiB", disk="2GiB"):
        command = [Path(sys.executable).with_name("cachesvc"), "node", "--socket", self.socket]
        tiers = ["--host-cache", host, "--disk-cache-dir", self.disk, "--disk-cache", disk]
        env = os.environ | room_in(self.disk.parent)
        self._process = subprocess.Popen([*command, *tiers, *self.more], cwd=ROOT, env=env)
        until(self.socket.exists)

    @property
    def pid(self):
        return self._process.pid

    def stats(self):
        with closing(NodeClient(self.socket)) as client:
            client.open()
            return client.stats()

    def pool(self):
        (pool,) = self.stats()["pools"]
        return dict(pool)

    def until_on_disk(self):
        until(lambda: not any(pool["is_writing"] for pool in self.stats()["pools"]))

    def stop(self):
        self._end(signal.SIGTERM)

    def kill(self):
        self._end(signal.SIGKILL)
        self.socket.unlink(missing_ok=True)

    def signal(self, number):
        self._process.send_signal(number)

    def _end(self, number):
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None
