"""An engine's intake: what it accepts, what is in flight, and how long a request would wait.

Any thread. The engine here has one, and so has one at a URL (`engine.remote`). A lock, held for a
few instructions, guards shared state.
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
    """Requests are in flight between `accept` and `ended`. `backlog` is set by who schedules them.
    Requests that it does not know of yet are counted here, by share."""

    def __init__(self, settings: EngineSettings, max_tokens: int) -> None:
        self.backlog = Backlog()
        self.failed: BaseException | None = None
        self._settings = settings
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._in_flight: set[str] = set()
        self._arriving: Counter[str] = Counter()  # tokens not queued yet
        self._closing = False

    def __len__(self) -> int:
        """The number of requests in flight."""
        return len(self._in_flight)

    @property
    def is_open(self) -> bool:
        """Whether it neither was closed nor has failed."""
        return self.failed is None and not self._closing

    @property
    def in_flight(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._in_flight)

    @property
    def arriving(self) -> Counter[str]:
        """Tokens that nobody schedules yet, by share."""
        with self._lock:
            return Counter(self._arriving)

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
        """Note that the scheduler knows of the request now."""
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
        """Accept nothing more, because the engine has failed."""
        with self._lock:
            self.failed = error

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        """How long a request of `share` would wait before it begins, if it were submitted now.

        Computed from the waiting work and the recent rate at which such work began. 0 while the
        rate is unknown. Callers use it to refuse early rather than let a client wait in vain.
        """
        backlog = self.backlog
        waiting = Counter(backlog.waiting)
        waiting.update(self.arriving)
        return backlog._replace(waiting=waiting).wait_s(share, num_tokens)

    def _check(self, request: Request, num_tokens: int) -> None:
        if num_tokens == 0:
            raise EmptyPrompt("the prompt has no tokens; send at least one")
        if num_tokens >= self._max_tokens:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, and at most {self._max_tokens - 1} fit the "
                f"engine with one token to generate; shorten it"
            )
        self._settings.check_params(request.params)
        self._check_adapter(request)
        if wrong := refusal(request.contents, num_tokens):
            raise InvalidParameter(f"contents[{wrong[0]}] {wrong[1]}", param="contents")

    def _check_adapter(self, request: Request) -> None:
        """Raise UnknownAdapter for one that is not loaded. Adapters' KV is kept apart by their
        scopes."""
        adapters = self._settings.adapters
        if request.adapter is not None and request.adapter not in adapters:
            served = ", ".join(adapters) or "none"
            raise UnknownAdapter(
                f"no adapter {request.adapter!r} is loaded (loaded: {served})", param="model"
            )
        digest = adapters[request.adapter] if request.adapter is not None else b""
        assert request.scope.adapter == digest, (request.adapter, request.scope)
