"""The progress bar of a server's start, removed before it serves."""

import logging
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)


class StartupBar:
    """A bar on a terminal, a log line for each kind of work elsewhere.

    Log lines are written above it. Used by the starting thread only.
    """

    def __init__(self, console: Console) -> None:
        self._said: set[str] = set()
        self._bar: Progress | None = None
        self._console = console
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            drawn = "dots" if self._console.encoding.startswith("utf") else "line"
            columns = (SpinnerColumn(drawn), TextColumn("{task.description}"), BarColumn(24))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console)
            self._bar.live.transient = True
            self._task = self._bar.add_task("starting", total=None)
            self._log_above()
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def show(self, what: str, part: float | None) -> None:
        if self._bar is None:
            if what not in self._said:
                self._said.add(what)
                logger.info(what)
            return
        total = None if part is None else 1.0
        self._bar.update(self._task, description=what, total=total, completed=part or 0.0)

    def stop(self) -> None:
        """Removes the bar. Idempotent."""
        if self._bar is None:
            return
        self._bar.stop()
        self._bar = None
        for handler, stream in self._streams:
            handler.setStream(stream)

    def _log_above(self) -> None:
        """Sends log lines above the bar. Written to the terminal directly, they would break it."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                above = FileProxy(self._console, self._console.file)
                self._streams.append((handler, handler.setStream(above)))
