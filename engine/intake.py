"""The intake of the engine: what it accepts, how much is in flight, how long a request would wait.

Any thread; what is shared is guarded by a lock held for a few instructions.
"""

import threading
from collections import Counter

from engine.errors import (
    EmptyPrompt,
    EngineClosed,
    EngineFailed,
    InvalidParameter,
    PromptTooLong,
    QueueFull,
    UnknownAdapter,
)
from engine.request import Request
from engine.scheduling.shares import Backlog
from engine.settings import EngineSettings
from tiers.blocks.contents import refusal


class Intake:
    """Requests between `accept` and `ended` are in flight. `backlog` is the scheduler's, set once a
    step; those that it does not know of yet are counted here, by share."""

    def __init__(self, settings: EngineSettings, max_tokens: int) -> None:
        self.backlog = Backlog()
        self.failed: BaseException | None = None
        self._settings = settings
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._in_flight: set[str] = set()
        self._arriving: Counter[str] = Counter()  # tokens that are not queued yet
        self._closing = False

    def __len__(self) -> int:
        """How many requests are in flight."""
        return len(self._in_flight)

    def accept(self, request: Request) -> None:
        """Count a request in. Raises EmptyPrompt, PromptTooLong, InvalidParameter, UnknownAdapter,
        QueueFull, EngineClosed or EngineFailed."""
        num_tokens = len(request.tokens)
        self._check(request, num_tokens)
        with self._lock:
            if self.failed is not None:
                raise EngineFailed(f"the engine has failed: {self.failed}") from self.failed
            if self._closing:
                raise EngineClosed("the engine is shutting down")
            if len(self._in_flight) >= self._settings.max_waiting:
                raise QueueFull(
                    f"{len(self._in_flight)} requests are in flight, as many as are allowed; "
                    f"try again later"
                )
            assert request.request_id not in self._in_flight, f"{request.request_id} runs already"
            self._in_flight.add(request.request_id)
            self._arriving[request.share] += num_tokens

    def queued(self, request: Request) -> None:
        """The request has reached the engine's thread: the scheduler knows of it from here on."""
        with self._lock:
            self._arriving[request.share] -= len(request.tokens)
            if not self._arriving[request.share]:
                del self._arriving[request.share]

    def ended(self, request_id: str) -> None:
        with self._lock:
            self._in_flight.discard(request_id)

    def close(self) -> None:
        """Accept nothing more."""
        with self._lock:
            self._closing = True

    def fail(self, error: BaseException) -> None:
        """Accept nothing more, for the engine has failed."""
        with self._lock:
            self.failed = error

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        """How long a request of `share` would wait before it begins, if it were submitted now.

        From the work that waits and the rate at which such work began lately; 0 while nothing is
        known. For whoever would rather refuse early than let a client wait in vain.
        """
        backlog = self.backlog
        waiting = Counter(backlog.waiting)
        with self._lock:
            waiting.update(self._arriving)
        return Backlog(waiting, backlog.tokens_per_s).wait_s(share, num_tokens)

    def _check(self, request: Request, num_tokens: int) -> None:
        if num_tokens == 0:
            raise EmptyPrompt("the prompt has no tokens; send at least one")
        if num_tokens >= self._max_tokens:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, and at most {self._max_tokens - 1} fit the "
                f"model's context and the device cache with one token to generate; shorten it"
            )
        self._settings.check_params(request.params)
        self._check_adapter(request)
        if wrong := refusal(request.contents, num_tokens):
            raise InvalidParameter(f"contents[{wrong[0]}] {wrong[1]}", param="contents")

    def _check_adapter(self, request: Request) -> None:
        """Raises UnknownAdapter. That the scope names the adapter keeps its KV apart."""
        adapters = self._settings.adapters
        if request.adapter is not None and request.adapter not in adapters:
            served = ", ".join(adapters) or "none"
            raise UnknownAdapter(
                f"no adapter {request.adapter!r} is loaded (loaded: {served})", param="model"
            )
        digest = adapters[request.adapter] if request.adapter is not None else b""
        assert request.scope.adapter == digest, (request.adapter, request.scope)
