"""Child processes that a test may kill, forked from a small process and not from the tests' own.

A fork copies the page tables of its parent. The tests' process is large, and where memory is short
the kernel refuses the copy. The small process has imported what the children need.
"""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.patience import ended

ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
IMPORTED = [
    *("pytest", "hypothesis", "billing.ledger", "billing.store.opening", "tests.serving"),
    *("tiers.disk.open", "tiers.node.node", "tests.support.faulty_storage"),
]


def ran(code: str, *arguments: object, env: Mapping[str, str] | None = None) -> str:
    """What a program of Python prints, in a process of its own."""
    done = ended(sys.executable, "-c", code, *arguments, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def in_child(work: Callable[..., None], *arguments: object) -> int:
    """Run `work`, a function of a module: its exit status, or the signal that ended it below 0."""
    process = start_child(work, *arguments)
    process.join()
    assert process.exitcode is not None
    status = process.exitcode
    process.close()
    return status


def start_child(work: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """A running child; it ends with `work`, whatever threads that left."""
    FORKS.set_forkserver_preload(IMPORTED)
    process = FORKS.Process(target=_run, args=(work, arguments), daemon=True)
    process.start()
    return process


class Program:
    """A command of `cachesvc`, which has no imports to wait for: they are four seconds of the five
    that a server takes to start. Faces as `subprocess.Popen` does."""

    def __init__(
        self, arguments: list[str], *, cwd: Path, env: Mapping[str, str], log: Path
    ) -> None:
        """What it prints is added to `log`."""
        FORKS.set_forkserver_preload(IMPORTED)
        self._process = FORKS.Process(target=_command, args=(arguments, cwd, dict(env), log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _command(arguments: list[str], cwd: Path, env: dict[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = ["cachesvc", *arguments]
    from cachesvc.cli import main

    main()


def _run(work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    status = 1
    try:
        work(*arguments)
        status = 0
    except BaseException:  # noqa: BLE001  it is printed, and told by the status
        traceback.print_exc()
    finally:
        os._exit(status)
