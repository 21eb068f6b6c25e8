"""A program on a terminal of its own, and the screen that its user sees."""

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from contextlib import contextmanager

import pyte

from tests.patience import PATIENCE_S

COLUMNS, ROWS = 120, 40


class Terminal:
    """A running program, everything it wrote (`written`), and its screen (`lines`)."""

    def __init__(self, process, terminal):
        self.process = process
        self.written = ""
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self._terminal = terminal

    @property
    def lines(self):
        """The screen's lines without their padding."""
        return [line.rstrip() for line in self.screen.display]

    def read_until(self, wanted, deadline_s=PATIENCE_S):
        """Read until the screen holds `wanted`, also across a line break of the terminal."""
        ends_s = time.monotonic() + deadline_s
        while wanted not in "".join(self.screen.display):
            assert time.monotonic() < ends_s, "\n".join(self.lines)
            assert self._read(), f"the program ended: {self.written}"

    def read_to_end(self, deadline_s=PATIENCE_S):
        """Read until the program closes its terminal."""
        ends_s = time.monotonic() + deadline_s
        while self._read():
            assert time.monotonic() < ends_s, "\n".join(self.lines)

    def type(self, keys):
        os.write(self._terminal, keys.encode())

    def stop(self):
        """SIGTERM, the rest of what it writes, and its exit status."""
        self.process.send_signal(signal.SIGTERM)
        self.read_to_end()
        return self.process.wait()

    def _read(self):
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
def on_a_terminal(command, folder):
    """Run `command` in `folder` on a terminal of 120 columns; kill it at the end.

    The shell opens the terminal as the leader of a new session, which makes it the controlling one.
    `pty.fork` would copy the page tables of the tests' process: a large one has no room for that.
    """
    terminal, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
    opened = ["/bin/sh", "-c", 'exec <>"$0"; exec "$@"', os.ttyname(slave), *command]
    ends = {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": True}
    process = subprocess.Popen(opened, cwd=folder, env={**os.environ, **size}, **ends)
    os.close(slave)
    try:
        yield Terminal(process, terminal)
    finally:
        os.close(terminal)
        process.kill()
        process.wait()
