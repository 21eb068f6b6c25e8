"""Child processes that a test may kill, forked from a small process and not from the tests' own.

A fork copies the page tables of its parent. The tests' process is large, and where memory is short
the kernel refuses the copy. The small process has imported what the children need.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = ["pytest", "billing.store.opening", "tiers.disk.open", "tests.support.faulty_storage"]


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


def _run(work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    status = 1
    try:
        work(*arguments)
        status = 0
    except BaseException:  # noqa: BLE001  it is printed, and told by the status
        traceback.print_exc()
    finally:
        os._exit(status)
