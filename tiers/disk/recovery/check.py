"""Checks a shard before LMDB opens it, because LMDB may crash on damage.

`check_shard` walks every structural page, through `recovery.pages`, and compares the databases with
each other. Payloads are not read; they have their own checksums. There are three results. The shard
is sound. Or some entries contradict each other: they are listed, and `Shard.fix` removes them. Or
the structure is broken: then the state before the last commit is tried, which LMDB keeps for two
more commits. If that is broken too, the shard is given up.

If a check takes longer than a moment, a child process continues it (`ShardCheck`), so the server
starts at once and its threads do not wait: `python -m tiers.disk.recovery SHARD MAP_BYTES`.
"""

import math
import os
import pickle
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tiers.disk.recovery.consistency import Fixes, Repair, ShardSums
from tiers.disk.recovery.page import PAGE, Torn
from tiers.disk.recovery.pages import DATA_VERSION, MAGIC, Head, Node, PageFile, Walked

CHECK_AT_ONCE_S = 0.25  # beyond this a child checks the shard, which is readable meanwhile
NAMES = ("data", "index", "order", "scopes", "state")
_LOOK_EVERY = 64  # entries between two checks of the clock


class TooLong(Exception):
    """The walk did not finish in time."""


@dataclass(slots=True)
class ShardReport:
    """The result of a check. `problem` is set if the shard must be given up."""

    problem: str | None = None
    rolled_back: str | None = None  # why the last commit was given up, if the one before is sound
    slot: int = 0  # of the sound state
    transaction: int = 0
    fixes: Fixes = field(default_factory=Fixes)


def check_shard(path: Path, map_bytes: int, within_s: float = math.inf) -> ShardReport:
    """Checks the shard in `path`, which nobody may write meanwhile. Raises TooLong and OSError."""
    deadline = time.monotonic() + within_s
    fd = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        file = PageFile(fd, map_bytes)
        heads = file.heads()
        if not heads:
            if _is_another_format(fd):
                return ShardReport()  # not for this reader to judge
            return ShardReport(problem="neither of its first two pages can be read")
        why = "" if len(heads) == 2 else "one of its first two pages cannot be read"
        for head in heads:
            try:
                fixes = _Check(file, head, deadline).run()
            except Torn as torn:
                why = str(torn)
                continue
            return ShardReport(None, why or None, head.slot, head.transaction, fixes)
        return ShardReport(problem=why)
    finally:
        os.close(fd)


def roll_back(path: Path, slot: int) -> None:
    """Makes the state in `slot` the only one: copies its page over the other's."""
    other = 1 - slot
    with (path / "data.mdb").open("r+b") as file:
        page = bytearray(os.pread(file.fileno(), PAGE, slot * PAGE))
        page[:8] = other.to_bytes(8, "little")
        os.pwrite(file.fileno(), page, other * PAGE)
        os.fsync(file.fileno())
    (path / "lock.mdb").unlink(missing_ok=True)  # it has numbers of the removed state


def last_transaction(path: Path, map_bytes: int) -> int:
    """The number of the last valid commit; 0 if none can be read."""
    fd = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return max((head.transaction for head in PageFile(fd, map_bytes).heads()), default=0)
    finally:
        os.close(fd)


def _is_another_format(fd: int) -> bool:
    """Whether both states were written by another version of LMDB."""
    versions = set()
    for slot in (0, 1):
        page = os.pread(fd, 32, slot * PAGE)
        if int.from_bytes(page[16:20], "little") != MAGIC:
            return False
        versions.add(int.from_bytes(page[20:24], "little"))
    return len(versions) == 1 and DATA_VERSION not in versions


class _Check:
    def __init__(self, file: PageFile, head: Head, deadline: float) -> None:
        self._file = file
        self._head = head
        self._deadline = deadline
        self._walked = Walked()
        self._free = array("Q")

    def run(self) -> Fixes:
        """The fixes needed. Raises Torn for a broken structure, and TooLong."""
        self._walk_free()
        trees = self._file.trees(self._head)
        for _ in self._file.nodes(self._head.main, self._walked):
            pass
        if unknown := set(trees) - set(NAMES):
            raise Torn(f"there are trees called {sorted(unknown)}")
        if trees and (missing := set(NAMES) - set(trees)):
            raise Torn(f"there is no tree called {sorted(missing)}")
        if not trees:
            self._check_pages()
            return Fixes()
        books = ShardSums(self._file)
        for name in NAMES:
            for node in self._timed(self._file.nodes(trees[name], self._walked)):
                books.take(name, node)
        self._check_pages()
        if books.agree():
            return Fixes()
        return Repair(self._file, trees).fixes()

    def _timed(self, nodes: Iterator[Node]) -> Iterator[Node]:
        for number, node in enumerate(nodes):
            late = number % _LOOK_EVERY == 0 and time.monotonic() > self._deadline
            if late:
                raise TooLong
            yield node

    def _walk_free(self) -> None:
        """Walks the free pages, listed by the transaction that freed them."""
        for node in self._timed(self._file.nodes(self._head.free, self._walked)):
            if len(node.key) != 8 or node.is_tree:
                raise Torn("the list of free pages has a key of another kind")
            if int.from_bytes(node.key, "little") > self._head.transaction:
                raise Torn("pages are free that a later transaction freed")
            pages = self._file.free_pages(node, self._head.last_page)
            self._free.frombytes(pages.tobytes())

    def _check_pages(self) -> None:
        """Checks that no page is used twice and none is beyond the last."""
        import numpy as np  # here, since a command that only counts blocks needs none

        walked = self._walked
        runs = np.array(walked.runs, np.uint64).reshape(-1, 2)
        single = np.concatenate(
            [
                np.array(walked.branch, np.uint64),
                np.array(walked.leaf, np.uint64),
                np.frombuffer(self._free, np.uint64),
            ]
        )
        first = np.concatenate([single, runs[:, 0]])
        end = np.concatenate([single + np.uint64(1), runs[:, 0] + runs[:, 1]])
        order = np.argsort(first)
        first, end = first[order], end[order]
        if len(first) and int(end[-1]) - 1 > self._head.last_page:
            raise Torn("a page is in use beyond the last one")
        if not (end[:-1] <= first[1:]).all():
            raise Torn("a page is in two places")


class ShardCheck:
    """A check that may take long: first in this process for a moment, then in a child process."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        self._path = path
        self._map_bytes = map_bytes
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None  # drains the pipe, which holds only 64 KiB
        self._said = (b"", b"")  # the child's output and errors, once it has ended
        self._began = 0

    def begin(self, within_s: float) -> ShardReport | None:
        """Checks in this process. Returns None if it takes longer and a child continues."""
        try:
            return check_shard(self._path, self._map_bytes, within_s)
        except TooLong:
            self._start()
            return None
        except OSError as error:
            return ShardReport(problem=str(error))

    def poll(self) -> ShardReport | None:
        """The child's report, once it is done. Starts again if the shard was written meanwhile."""
        child, reader = self._child, self._reader
        if child is None or reader is None or reader.is_alive():
            return None
        output, errors = self._said
        self._child = self._reader = None
        if child.returncode:
            said = errors.decode(errors="replace").strip()[-200:]
            return ShardReport(problem=said or f"the check ended with {child.returncode}")
        if last_transaction(self._path, self._map_bytes) != self._began:
            self._start()
            return None
        report: ShardReport = pickle.loads(output)  # noqa: S301 - of a child of ours
        return report

    def cancel(self) -> None:
        child, self._child = self._child, None
        reader, self._reader = self._reader, None
        if child is not None and reader is not None:
            child.kill()
            reader.join()

    def _start(self) -> None:
        self._began = last_transaction(self._path, self._map_bytes)
        command = [sys.executable, "-m", "tiers.disk.recovery"]
        self._child = subprocess.Popen(
            [*command, str(self._path), str(self._map_bytes)],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        name = f"cachesvc-check-{self._path.name}"
        self._reader = threading.Thread(
            target=self._read, args=(self._child,), name=name, daemon=True
        )
        self._reader.start()

    def _read(self, child: "subprocess.Popen[bytes]") -> None:
        self._said = child.communicate()
