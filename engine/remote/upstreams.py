"""The engines that serve one model, each at a URL: who gets a request, and who answers at all.

The one with the fewest requests in flight, and nothing cleverer. One that failed several times in a
row is left alone for a while. On the loop of the requests, but for what `use` tells.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.errors import (
    AdapterError,
    EngineAway,
    InvalidParameter,
    ModelError,
    RemoteAway,
    RemoteBusy,
    RemoteDenied,
    RemoteFault,
    RemoteRefused,
)
from engine.remote.client import EngineHttp
from engine.remote.metrics import counters_in
from engine.remote.protocol import Protocol
from engine.request import Request, TokenCounts
from engine.stats import EngineUse
from tiers.remote.breaker import Breaker

logger = logging.getLogger(__name__)

PROBE_S = 10.0
JOIN_S = 1.0  # between looks for one that is away


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """The engine as it was found. `num_blocks` is the size of its cache, if it says."""

    protocol: Protocol
    model: str
    max_tokens: int
    block_size: int
    kind: str = ""
    version: str = ""
    num_blocks: int = 0


class Upstream:
    """One of the engines. `counters` are of its own metrics. It has no `remote` if requests pass to
    it as they are.

    One that did not answer at the start, or that failed too often since, is asked for nothing until
    `find` has found it: another may answer there now. `find` raises ModelError for what must not be
    used. One that denies a request is asked by `find` too, since the request alone may be wrong.
    """

    def __init__(
        self,
        http: EngineHttp,
        remote: Remote | None = None,
        *,
        find: Callable[[], Awaitable[Remote | None]],
        is_found: bool = True,
    ) -> None:
        self.http = http
        self._remote = remote
        self._find = find
        self._is_away = not is_found
        self._is_doubted = False  # it denied a request
        self.is_found = is_found  # by now or before
        self._refused = ""  # why what answers there is not used
        self.counters: dict[str, float] = {}
        self.num_in_flight = 0
        self._breaker = Breaker()
        self._missed_probe = False
        self._prompt_tokens = self._hit_tokens = self._errors = 0

    @property
    def remote(self) -> Remote:
        assert self._remote is not None, f"requests pass to {self.http.url}"
        return self._remote

    @property
    def is_up(self) -> bool:
        """Whether it answered when it was last asked, or did not fail often enough to tell."""
        return not self._is_away

    def use(self) -> EngineUse:
        tokens = self._prompt_tokens, self._hit_tokens
        counts = self.num_in_flight, *tokens, self._errors
        return EngineUse(self.http.url, self.is_up, *counts, is_refused=bool(self._refused))

    def allows(self, request: Request | None) -> bool:
        """Whether to ask it now for this request, which those took that had been found then."""
        with contextlib.suppress(InvalidParameter):
            if request is not None and not self._is_away:
                self.remote.protocol.check(request)
            return not self._is_away
        return False

    def answered(self) -> None:
        """It answers as it should."""
        self._breaker.succeeded()

    def failed(self, fault: RemoteFault) -> None:
        self._errors += 1
        self._is_doubted |= isinstance(fault, RemoteDenied)
        if not isinstance(fault, RemoteBusy | RemoteRefused | RemoteDenied):
            self._missed()

    def _missed(self) -> None:
        self._breaker.failed()
        self._is_away |= self._breaker.is_tripped

    def served(self, counts: TokenCounts) -> None:
        self._prompt_tokens += counts.prompt
        self._hit_tokens += counts.hit

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """While it has a request. Notes a fault that ends it."""
        self.num_in_flight += 1
        try:
            yield
        except RemoteFault as fault:
            self.failed(fault)
            raise
        finally:
            self.num_in_flight -= 1

    async def probe(self, *, counting: bool) -> None:
        """Asks whether it serves, unless it is away, and reads its counters if wanted. An answer
        here does not make up for requests that failed."""
        if self._is_away:
            return
        try:
            async with asyncio.timeout(PROBE_S):
                status, _ = await self.http.ask("GET", "/health")
                if status >= 500:
                    raise RemoteAway(f"it says {status}")
                if counting:
                    _, text = await self.http.ask("GET", "/metrics")
                    self.counters = counters_in(str(text))
        except (RemoteFault, TimeoutError):
            self._missed_probe = True
            self._missed()
        else:
            if self._missed_probe:
                self._missed_probe = False
                self._breaker.succeeded()

    async def watch(self) -> None:
        """Looks for it whenever it is away, without an end."""
        while True:
            await self.join()
            await asyncio.sleep(JOIN_S)

    async def join(self) -> None:
        """Returns once it is found."""
        while self._is_away or self._is_doubted:
            await asyncio.sleep(JOIN_S)
            if not self._breaker.allows():
                continue
            self._is_doubted = False
            try:
                self._remote = await self._find()
            except ModelError as error:
                is_silent = isinstance(error, EngineAway)
                # Without one adapter it still serves the others.
                self._is_away |= not (is_silent or isinstance(error, AdapterError))
                is_busy = isinstance(error.__cause__, RemoteBusy)  # it answers, if not this
                if (self._is_away or is_silent) and not is_busy:
                    self._missed()
                refused = str(error) if self._is_away and not is_silent else ""
                if refused and refused != self._refused:
                    logger.error(f"{refused}; it is not used")
                self._refused = refused
            except Exception:  # an answer that nothing foresaw must not end the looks
                logger.exception(f"what answers at {self.http.url} is not understood, nor used")
                self._is_away = True
                self._missed()
            else:
                if self._is_away:
                    logger.info(f"the engine at {self.http.url} answers now, and is used")
                    self._breaker.succeeded()
                self.is_found, self._is_away, self._refused = True, False, ""


class Upstreams:
    """All engines of the model; at least one is found."""

    def __init__(self, each: Sequence[Upstream]) -> None:
        self.each = tuple(each)

    @property
    def found(self) -> list[Upstream]:
        return [each for each in self.each if each.is_found]

    def pick(self, but: Upstream | None = None, request: Request | None = None) -> Upstream | None:
        """The one for a next request; None if none can be asked. One that takes tokens is given the
        `request`."""
        others = [each for each in self.each if each is not but]
        others.sort(key=lambda each: each.num_in_flight)
        return next((each for each in others if each.allows(request)), None)

    def total(self, name: str) -> float:
        """The sum of a counter."""
        return sum(each.counters.get(name, 0.0) for each in self.each)

    async def probe(self, *, counting: bool) -> None:
        await asyncio.gather(*(each.probe(counting=counting) for each in self.each))

    async def watch(self) -> None:
        await asyncio.gather(*(each.watch() for each in self.each))

    async def close(self) -> None:
        for each in self.each:
            await each.http.close()
