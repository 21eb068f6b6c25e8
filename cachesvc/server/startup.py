"""The phases of a server's start. Importing torch and loading a model take seconds to minutes.

Meanwhile its port is taken and refuses connections.
"""

import contextlib
import logging
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

SAY_EVERY_S = 10.0  # how far work within a phase is


class Startup:
    """The time of each phase; logs what is done."""

    def __init__(self) -> None:
        self._said, self._said_s = "", 0.0
        self._began_s = time.monotonic()
        self.took_s: dict[str, float] = {}  # of each finished phase, in order

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts the block as `phase`."""
        began_s = time.monotonic()
        logger.info(phase)
        yield
        self.took_s[phase] = time.monotonic() - began_s

    def progress(self, what: str, part: float) -> None:
        """Logs work within a phase, now and then; `part` is the done share, from 0 to 1."""
        now_s = time.monotonic()
        if part < 1 and (what != self._said or now_s - self._said_s >= SAY_EVERY_S):
            self._said, self._said_s = what, now_s
            logger.info(f"{what}: {part:.0%}" if part else what)

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._began_s
