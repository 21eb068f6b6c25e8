"""Requests, miss tokens, output tokens a minute and concurrency, by key and by tenant.

A request is let in while each of its windows has something left, and books what it really used
when it ends: misses and output are not known before, and hits are never booked, so good prompts
are rewarded. A window may thus be overdrawn by what was running when it ran out; the next request
then waits for the new window. Requests are booked at the door. Windows live in the `limits`
library, in memory or in Redis; concurrency is counted here, for this server alone. A store that
does not answer lets requests in: limits protect the machine, the ledger protects the money.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import Storage
from limits.aio.strategies import FixedWindowRateLimiter
from limits.errors import StorageError
from limits.storage import storage_from_string

from api.errors import RateLimited
from billing.keys import Principal
from billing.usage import Usage

logger = logging.getLogger(__name__)

CONCURRENCY_RETRY_S = 1  # nobody knows when a place gets free


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one key or tenant may use; None is no limit. Counts are per minute."""

    requests: int | None = None
    miss_tokens: int | None = None
    output_tokens: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """Quotas of each tenant and each key; `tenants` and `keys` name the exceptions."""

    tenant: Quota = field(default_factory=Quota)
    key: Quota = field(default_factory=Quota)
    tenants: Mapping[str, Quota] = field(default_factory=dict)
    keys: Mapping[str, Quota] = field(default_factory=dict)


class Permit(Protocol):
    """One admitted request's place; `headers` go out with its answer."""

    @property
    def headers(self) -> Mapping[str, str]: ...

    async def close(self, usage: Usage) -> None:
        """Gives the place back and books what was used. Called once."""
        ...


class RateLimits(Protocol):
    """Raises RateLimited, or lets the request in."""

    async def admit(self, principal: Principal) -> Permit: ...


@dataclass(frozen=True, slots=True)
class FreePass:
    """The permit of a server without limits."""

    headers: Mapping[str, str] = field(default_factory=dict)

    async def close(self, usage: Usage) -> None:
        """Nothing was taken."""


class NoLimits:
    """A server without limits."""

    async def admit(self, principal: Principal) -> Permit:
        return FreePass()


class Holder(NamedTuple):
    """Whose quota it is: ("key", id) or ("tenant", name)."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class _Window:
    """One per-minute limit of one holder, and the word for it in OpenAI's headers."""

    holder: Holder
    what: str
    item: RateLimitItem


class _Reading(NamedTuple):
    window: _Window
    reset_s: float
    remaining: int


class WindowLimits:
    """`RateLimits` over a store of the `limits` library. Event loop only."""

    def __init__(self, settings: LimitSettings, storage: Storage) -> None:
        self._settings = settings
        self._limiter = FixedWindowRateLimiter(storage)
        self._running: Counter[Holder] = Counter()

    async def admit(self, principal: Principal) -> Permit:
        quotas = list(self._quotas(principal))
        self._check_concurrency(quotas)
        windows = [window for holder, quota in quotas for window in _windows(holder, quota)]
        holders = [holder for holder, _ in quotas]
        self._running.update(holders)
        try:
            readings = await self._enter(windows)
        except BaseException:
            self._leave(holders)
            raise
        return _Place(self, holders, windows, _headers(readings))

    async def book(self, windows: Sequence[_Window], usage: Usage) -> None:
        """Counts what a request used against its windows."""
        used = {"tokens": usage.miss, "output-tokens": usage.output}
        for window in windows:
            if cost := used.get(window.what, 0):
                await self._hit(window, cost)

    def _leave(self, holders: Sequence[Holder]) -> None:
        self._running.subtract(holders)
        for holder in holders:
            if self._running[holder] <= 0:
                del self._running[holder]

    async def _enter(self, windows: Sequence[_Window]) -> list[_Reading]:
        """Readings after this request was booked. Raises RateLimited if any window is used up."""
        try:
            before = [await self._read(window) for window in windows]
            used_up = [reading for reading in before if reading.remaining <= 0]
            if used_up:
                raise _refusal(max(used_up, key=lambda reading: reading.reset_s), before)
            for reading in before:
                if reading.window.what == "requests":
                    await self._limiter.hit(reading.window.item, *reading.window.holder)
            return [await self._read(window) for window in windows]
        except StorageError as error:
            logger.warning("rate limits are off: their store fails: %s", error.storage_error)
            return []

    async def _read(self, window: _Window) -> _Reading:
        stats = await self._limiter.get_window_stats(window.item, *window.holder)
        reset_s = max(0.0, stats.reset_time - time.time())
        return _Reading(window, reset_s, stats.remaining)

    async def _hit(self, window: _Window, cost: int) -> None:
        try:
            await self._limiter.hit(window.item, *window.holder, cost=cost)
        except StorageError as error:
            logger.warning("%s tokens were not booked: %s", cost, error.storage_error)

    def _quotas(self, principal: Principal) -> Iterator[tuple[Holder, Quota]]:
        settings = self._settings
        tenant = settings.tenants.get(principal.tenant, settings.tenant)
        yield Holder("tenant", principal.tenant), tenant
        if principal.key_id:
            yield Holder("key", principal.key_id), settings.keys.get(principal.key_id, settings.key)

    def _check_concurrency(self, quotas: Sequence[tuple[Holder, Quota]]) -> None:
        for holder, quota in quotas:
            if quota.concurrency is not None and self._running[holder] >= quota.concurrency:
                raise RateLimited(
                    f"This {holder.kind} has {quota.concurrency} requests running, as many as it "
                    "may; wait for one to end.",
                    headers={"Retry-After": str(CONCURRENCY_RETRY_S)},
                )


@dataclass(slots=True)
class _Place:
    """The permit of one request under `WindowLimits`."""

    limits: WindowLimits
    holders: Sequence[Holder]
    windows: Sequence[_Window]
    headers: Mapping[str, str]

    async def close(self, usage: Usage) -> None:
        self.limits._leave(self.holders)
        await self.limits.book(self.windows, usage)


def open_storage(url: str) -> Storage:
    """The store of `memory://` or a `redis://` URL, with its errors as StorageError."""
    options = {} if url.startswith("memory") else {"implementation": "redispy"}
    storage = storage_from_string(f"async+{url}", wrap_exceptions=True, **options)
    assert isinstance(storage, Storage), url
    return storage


def _windows(holder: Holder, quota: Quota) -> Iterator[_Window]:
    amounts = {
        "requests": quota.requests,
        "tokens": quota.miss_tokens,
        "output-tokens": quota.output_tokens,
    }
    for what, amount in amounts.items():
        if amount is not None:
            namespace = f"cachesvc-{what}"
            yield _Window(holder, what, RateLimitItemPerMinute(amount, namespace=namespace))


def _refusal(worst: _Reading, readings: Sequence[_Reading]) -> RateLimited:
    window, wait_s = worst.window, max(1, round(worst.reset_s + 0.5))
    words = {"tokens": "cache-miss tokens", "output-tokens": "output tokens"}
    what = words.get(window.what, window.what)
    return RateLimited(
        f"This {window.holder.kind} has used its {window.item.amount} {what} of this minute; "
        f"retry in {wait_s} s. Prompt tokens served from the cache do not count.",
        headers={"Retry-After": str(wait_s), **_headers(readings)},
    )


def _headers(readings: Sequence[_Reading]) -> dict[str, str]:
    """OpenAI's x-ratelimit headers, of the tightest window of each kind."""
    tightest: dict[str, _Reading] = {}
    for reading in readings:
        what = reading.window.what
        if what not in tightest or reading.remaining < tightest[what].remaining:
            tightest[what] = reading
    headers = {}
    for what, reading in tightest.items():
        headers[f"x-ratelimit-limit-{what}"] = str(reading.window.item.amount)
        headers[f"x-ratelimit-remaining-{what}"] = str(max(0, reading.remaining))
        headers[f"x-ratelimit-reset-{what}"] = f"{reading.reset_s:.3f}s"
    return headers
