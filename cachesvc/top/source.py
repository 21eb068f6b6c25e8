"""Reads the running server for `top`, in two requests to its admin routes. Any thread."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachesvc.observability.names import HIT_RATE, PROMPT_TOKENS
from cachesvc.server.server_file import LiveServer

WINDOW_S = 120.0  # of the sparklines

SPARKS: Mapping[str, str] = {
    "prompt tok/s": f"rate:{PROMPT_TOKENS}",
    "hit rate": HIT_RATE,
    "ttft p95": "p95:latency.ttft",
    "output tok/s": "rate:traffic.generation_tokens",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """The server's state at one moment, from its admin routes."""

    url: str
    stats: Mapping[str, Any]  # /admin/api/stats
    history: Mapping[str, Sequence[float | None]]  # by the names in SPARKS
    at_s: float = field(default_factory=time.time)


class LiveSource:
    """Readings of a running server. Blocks. Raises LiveError if it does not answer."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server

    def read(self) -> Reading:
        query = [("window_s", str(WINDOW_S)), *(("series", each) for each in SPARKS.values())]
        history = self._server.get("/admin/api/history", query)["series"]
        return Reading(
            self._server.url,
            self._server.get("/admin/api/stats"),
            {name: history[series] for name, series in SPARKS.items()},
        )
