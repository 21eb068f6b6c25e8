"""Carries outputs from the engine's thread to the requests on the event loop.

The engine calls `deliver` once per step, on its own thread, with the outputs of every sequence. One
`call_soon_threadsafe` takes them to the loop, where each request's `OutputFeed` gets its part. A
feed is bounded by what its request may generate. A slow reader takes all that has gathered and
sends it in one write.
"""

import asyncio
from collections.abc import Iterable, Sequence

from engine.request import StepOutput


class OutputFeed:
    """The outputs of one client request, which may be several engine requests. Event loop only."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.request_ids = tuple(request_ids)
        self._pending: list[StepOutput] = []
        self._arrived = asyncio.Event()

    def put(self, output: StepOutput) -> None:
        self._pending.append(output)
        self._arrived.set()

    async def take(self, idle_s: float | None = None) -> list[StepOutput]:
        """All outputs since the last call; an empty list after `idle_s` of silence."""
        timer = None
        if idle_s is not None and not self._arrived.is_set():
            timer = asyncio.get_running_loop().call_later(idle_s, self._arrived.set)
        try:
            await self._arrived.wait()
        finally:
            if timer is not None:
                timer.cancel()
        self._arrived.clear()
        taken, self._pending = self._pending, []
        return taken


class OutputBridge:
    """Feeds by engine request id. `deliver` belongs to the engine thread, the rest to the loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._feeds: dict[str, OutputFeed] = {}

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sets the loop that receives outputs; called when the app starts."""
        self._loop = loop

    def unbind(self) -> None:
        """Drops further outputs; called after the last request has ended."""
        self._loop = None

    @property
    def num_open(self) -> int:
        return len(set(map(id, self._feeds.values())))

    def open(self, request_ids: Sequence[str]) -> OutputFeed:
        feed = OutputFeed(request_ids)
        for request_id in request_ids:
            assert request_id not in self._feeds, request_id
            self._feeds[request_id] = feed
        return feed

    def close(self, feed: OutputFeed) -> None:
        for request_id in feed.request_ids:
            self._feeds.pop(request_id, None)

    def deliver(self, outputs: Sequence[StepOutput]) -> None:
        """Called on the engine thread once per step."""
        loop = self._loop
        if loop is None or not outputs:
            return
        try:
            loop.call_soon_threadsafe(self._hand_out, tuple(outputs))
        except RuntimeError:  # the loop was closed since the check: nobody listens
            if not loop.is_closed():
                raise

    def _hand_out(self, outputs: Iterable[StepOutput]) -> None:
        for output in outputs:
            feed = self._feeds.get(output.request_id)
            if feed is not None:
                feed.put(output)
