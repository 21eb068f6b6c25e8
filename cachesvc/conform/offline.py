"""A server of our own for a run without one: small tiers and a folder of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
_PROGRAM = str(Path(sys.executable).with_name("cachesvc"))


@contextlib.contextmanager
def own_server(model: str | None) -> Iterator[str]:
    """The URL of a started `cachesvc serve`, which ends with its data at the end. Meanwhile SIGTERM
    raises KeyboardInterrupt, as Ctrl-C does, so that the server does not outlive this process."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="cachesvc-conform-") as folder:
        data, log = Path(folder, "data"), Path(folder, "serve.log")
        command = [_PROGRAM, "serve", "--port", "0", "--data-dir", str(data)]
        command += ["--model", model] if model else []
        environment = {**_ENVIRONMENT, **os.environ}  # noqa: TID251  the child's
        with log.open("wb") as out:
            child = subprocess.Popen(
                command, stdout=out, stderr=out, start_new_session=True, env=environment
            )
        try:
            yield _url_of(child, data, log)
        finally:
            stop(child, data)
            signal.signal(signal.SIGTERM, before)


def _url_of(child: "subprocess.Popen[bytes]", data: Path, log: Path) -> str:
    """Waits until it serves. Raises TargetError with the end of its log."""
    give_up = time.monotonic() + START_S
    while child.poll() is None and time.monotonic() < give_up:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads((data / "server.json").read_text())["url"])
        time.sleep(0.2)
    raise TargetError(f"the server does not start:\n{log.read_text(errors='replace')[-1500:]}")


def stop(child: "subprocess.Popen[bytes]", data: Path) -> None:
    """Stop it, and the node that a server over vLLM has started, which would outlive it."""
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if (node := data / "node.sock").exists():
        command = [_PROGRAM, "node", "--stop", "--socket", str(node)]
        subprocess.run(command, check=False, capture_output=True, timeout=STOP_S)
