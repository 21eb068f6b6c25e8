"""`cachesvc top`: a live view of the running server."""

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import fail, fitting_table
from cachesvc.server.server_file import LiveError
from cachesvc.top import model
from cachesvc.top.source import LiveSource, Reading

KEYS = "q leave  p hold the screen still, and go on"


def top(
    data_dir: DataDir = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, help="Seconds between updates")
    ] = 1.0,
) -> None:
    """Watch the running server: queues, tiers, hit rates, latencies. q leaves, p holds.

    hit is the share of prompt tokens that the cache served. hits/s, in/s and out/s are blocks that
    a tier served, got and lost. idle p50 is how long lost blocks lay unused: shorter than your
    users' pauses means that the tier is too small. The bars are the last two minutes. What each
    tenant uses is in `cachesvc usage`.

    Needs a terminal; for scripts use `/admin/api/stats` or `/metrics`.
    """
    server = running_server(data_dir)
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or Console().is_dumb_terminal:
        fail(
            "top needs a terminal that can draw; a script asks the server for /admin/api/stats "
            "or /metrics"
        )
    watch(LiveSource(server), interval)


def watch(source: LiveSource, interval_s: float) -> None:
    """Draws the server again and again until `q` is pressed. Needs a terminal."""
    console, screen = Console(highlight=False), Screen(source)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            screen.read()
            live.update(screen.drawn(console), refresh=True)
            if not screen.press(pressed(interval_s)):
                return


class Screen:
    """What is known of the server, and how it looks."""

    def __init__(self, source: LiveSource) -> None:
        self._source = source
        self._before: Reading | None = None
        self._reading: Reading | None = None
        self._trouble = ""
        self._paused = False

    def read(self) -> None:
        """Reads the server, unless the screen is held still. Keeps what it knew on an error."""
        if self._paused:
            return
        try:
            found = self._source.read()
        except LiveError as error:
            self._trouble = f"{error}; trying again"
            return
        self._before, self._reading, self._trouble = self._reading, found, ""

    def press(self, key: str) -> bool:
        """Does what a key asks. Returns whether to go on."""
        self._paused ^= key in ("p", " ")
        return key != "q"

    def drawn(self, console: Console) -> Group:
        """The screen at the console's width."""
        width, reading = console.width, self._reading
        alarms = [self._trouble] if self._trouble else []
        lines: list[Text | Table] = []
        if reading is not None:
            mark = "  [paused]" if self._paused else ""
            lines.append(Text(model.headline(reading) + mark, "bold white on blue"))
            alarms += model.alarms(reading)
            lines += map(Text, model.summary(reading, width))
            lines += (Text(each, "green") for each in model.spark_lines(reading, width))
            lines.append(_table(model.tier_rows(reading, self._before), width))
        lines[1:1] = (Text(each, "white on red") for each in alarms)
        return Group(*lines, Text(KEYS, "dim"))


def _table(rows: list[list[str]], width: int) -> Table:
    columns = model.TIER_COLUMNS
    return fitting_table(columns, rows, width, right=columns[1:], spare=model.SPARE)[0]


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields the function that waits some seconds for a key; "" if none was pressed. A terminal
    that has gone gives `q`."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(within_s: float) -> str:
        ready, _, _ = select.select([terminal], [], [], within_s)
        return (os.read(terminal, 1).decode(errors="replace") or "q") if ready else ""

    tty.setcbreak(terminal)
    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
