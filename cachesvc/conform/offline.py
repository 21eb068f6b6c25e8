"""A server of our own for a run without one: small tiers, a folder of its own, and restarts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cachesvc.conform.target import TargetError

START_S, STOP_S = 900.0, 120.0
# Defaults of the child, which a variable set outside replaces. The tiers are so small that a run
# reaches each: the default model's KV takes 3 MB a block. Whatever the disk holds is loaded, also
# where computing is faster: loading is what is proved.
_ENVIRONMENT = {
    "CACHESVC_CACHE__DEVICE_BYTES": "128MiB",
    "CACHESVC_CACHE__HOST_BYTES": "128MiB",
    "CACHESVC_CACHE__DISK_BYTES": "8GiB",
    "CACHESVC_CACHE__WEIGH_LOADS": "false",
}


class OwnServer:
    """`cachesvc serve` as a child. `folder` keeps its data across restarts."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self.data_dir = folder / "data"
        self._program = str(Path(sys.executable).with_name("cachesvc"))
        data = ("--data-dir", str(self.data_dir))
        self._command = [self._program, "serve", "--port", "0", *data, *options]
        self._child: subprocess.Popen[bytes] | None = None
        self._log = folder / "serve.log"
        self.url = ""

    def start(self, *more: str) -> None:
        """Start it, with more options, and wait until it serves. Raises TargetError with the end of
        its log."""
        environment = {**_ENVIRONMENT, **os.environ}  # noqa: TID251  the child's
        with self._log.open("wb") as out:
            self._child = subprocess.Popen(
                [*self._command, *more],
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=environment,
            )
        give_up = time.monotonic() + START_S
        while not self._ready():
            if self._child.poll() is not None or time.monotonic() > give_up:
                self.stop()
                said = self._log.read_text(errors="replace")[-1500:]
                raise TargetError(f"the server does not start:\n{said}")
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop it, and the node that a server over vLLM has started, which would outlive it."""
        child, self._child = self._child, None
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if (node := self.data_dir / "node.sock").exists():
            command = [self._program, "node", "--stop", "--socket", str(node)]
            subprocess.run(command, check=False, capture_output=True, timeout=STOP_S)

    def restart(self, *more: str) -> None:
        self.stop()
        self.start(*more)

    def _ready(self) -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.url = json.loads((self.data_dir / "server.json").read_text())["url"]
            return True
        return False


@contextlib.contextmanager
def own_server(options: Sequence[str]) -> Iterator[OwnServer]:
    """A started server in a temporary folder, stopped and removed at the end."""
    with tempfile.TemporaryDirectory(prefix="cachesvc-conform-") as folder:
        server = OwnServer(Path(folder), options)
        try:
            server.start()
            yield server
        finally:
            server.stop()
