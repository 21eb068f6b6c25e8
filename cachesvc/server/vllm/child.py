"""`vllm serve` as a child process, on a Unix socket that only this user can reach.

It ends with this process, however that ends: between both stands a keeper, which reads a pipe that
nobody writes to. The pipe's end means that we are gone. The keeper leads a process group, so vLLM's
workers end too.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from cachesvc.config.vllm import vllm_environment
from engine.errors import ModelError

logger = logging.getLogger(__name__)

START_S = 1800.0  # compiling and loading a large model take minutes
STOP_S = 30.0
LOOK_S = 0.1
LAST_LINES = 20  # of its log, for an error
_SERVER = "vllm.entrypoints.openai.api_server"


class VllmChild:
    """The process. `on_end` is called once if it ends before `close`, on a thread of ours."""

    def __init__(self, path: Path, flags: Sequence[str], *, exact: bool) -> None:
        self.socket = path
        self._flags = flags
        self._environment = vllm_environment(exact=exact)
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._closing = False
        self._on_end: Callable[[BaseException], None] = lambda error: None

    def start(self) -> None:
        """Starts it, and waits until it has loaded the model. Raises ModelError with its reason."""
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, _SERVER, "--uds", str(self.socket), *self._flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,  # Ctrl-C reaches every process of the terminal
        )
        self._log = threading.Thread(target=self._read, name="cachesvc-vllm-log", daemon=True)
        self._watch = threading.Thread(target=self._wait, name="cachesvc-vllm", daemon=True)
        self._log.start()
        self._watch.start()
        give_up = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None:
                self._watch.join()
                raise ModelError(f"vLLM did not start: {_reason(self._last)}")
            if time.monotonic() > give_up:
                raise ModelError(f"vLLM did not start within {START_S:g} s")
            time.sleep(LOOK_S)

    def on_end(self, call: Callable[[BaseException], None]) -> None:
        self._on_end = call
        if self._process.poll() is not None:
            call(self._ended())

    def close(self) -> None:
        """Ends it, and whatever it has started."""
        self._closing = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * STOP_S)
        _kill_group(self._process.pid)
        self._watch.join()
        self.socket.unlink(missing_ok=True)

    def _answers(self) -> bool:
        """It is bound at once, and listens when the model is loaded."""
        with socket.socket(socket.AF_UNIX) as asking:
            try:
                asking.connect(str(self.socket))
            except OSError:
                return False
        return True

    def _ended(self) -> BaseException:
        return ModelError(f"vLLM has ended with {self._process.returncode}: {_reason(self._last)}")

    def _read(self) -> None:
        """Passes on what it says, until it and its workers have ended."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if text := line.decode(errors="replace").rstrip():
                    self._last.append(text)
                    logger.info(text)

    def _wait(self) -> None:
        """Ends its workers once it has ended, and tells."""
        self._process.wait()
        _kill_group(self._process.pid)
        self._log.join()
        if not self._closing:
            self._on_end(self._ended())


def _reason(lines: Sequence[str]) -> str:
    """The last line that says what is wrong."""
    wrong = [line for line in lines if "rror" in line]
    return (wrong or list(lines) or ["it says nothing"])[-1]


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _keep(command: Sequence[str]) -> int:
    """Runs vLLM until it ends, or until nobody holds the other end of our input. In the child."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdin=subprocess.DEVNULL)

    gone = threading.Event()

    def end() -> None:
        os.read(0, 1)
        gone.set()
        process.terminate()
        time.sleep(STOP_S)
        _kill_group(os.getpgrp())

    threading.Thread(target=end, daemon=True).start()
    code = process.wait()
    if gone.is_set():
        _kill_group(os.getpgrp())
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_keep(sys.argv[1:]))
