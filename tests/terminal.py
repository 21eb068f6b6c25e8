"""A program on a terminal of its own, and the screen that its user sees."""

import os
import pty
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte

COLUMNS, ROWS = 120, 40


class Terminal:
    """A running program, everything it wrote (`written`), and its screen (`lines`)."""

    def __init__(self, process: int, terminal: int) -> None:
        self.process = process
        self.written = ""
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self._terminal = terminal

    @property
    def lines(self) -> list[str]:
        """The screen's lines without their padding."""
        return [line.rstrip() for line in self.screen.display]

    def read_until(self, wanted: str, deadline_s: float = 60.0) -> None:
        """Read until the screen holds `wanted`, also across a line break of the terminal."""
        ends_s = time.monotonic() + deadline_s
        while wanted not in "".join(self.screen.display):
            assert time.monotonic() < ends_s, "\n".join(self.lines)
            assert self._read(), f"the program ended: {self.written}"

    def read_to_end(self, deadline_s: float = 60.0) -> None:
        """Read until the program closes its terminal."""
        ends_s = time.monotonic() + deadline_s
        while self._read():
            assert time.monotonic() < ends_s, "\n".join(self.lines)

    def stop(self) -> int:
        """SIGTERM, the rest of what it writes, and its exit status."""
        os.kill(self.process, signal.SIGTERM)
        self.read_to_end()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def _read(self) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], 0.2)
        if not ready:
            return True
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # the other end is closed
            return False
        self.written += data.decode(errors="replace")
        self._stream.feed(data)
        return True


@contextmanager
def on_a_terminal(command: Sequence[str], folder: Path) -> Iterator[Terminal]:
    """Run `command` in `folder` on a terminal of 120 columns; kill it at the end."""
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], list(command), {**os.environ, **size})
    try:
        yield Terminal(process, terminal)
    finally:
        os.close(terminal)
        _kill(process)


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
