"""Limits by tenant, key and end user: requests, miss tokens and output tokens a minute, and
concurrency.

A request is admitted while each of its windows has something left. The request itself is counted at
admission. Its miss and output tokens are counted when it ends, because they are not known before.
So running requests can overdraw a window, and the next request then waits for a new one. Hits are
never counted, which rewards prompts that hit.

Windows live in the `limits` library and places in `api.access.concurrency`, both in memory, or in
Redis for all servers that share it. If the store does not answer, requests are admitted: limits
protect the machine, the ledger protects the money.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import Storage
from limits.aio.strategies import FixedWindowRateLimiter
from limits.errors import StorageError
from limits.storage import storage_from_string

from api.access.concurrency import CircuitBreaker, Holder, LocalPlaces, Places, RedisPlaces
from api.access.end_users import EndUsers
from api.errors import RateLimited
from billing.keys import Principal
from billing.tenants import OF_TENANT
from billing.usage import Usage

if TYPE_CHECKING:
    from redis.asyncio import ConnectionPool

CONCURRENCY_RETRY_S = 1  # when a place becomes free is not known
# What is counted by the minute: its name in OpenAI's headers, its field of `Quota`, its words.
COUNTED = (
    ("requests", "requests", "requests"),
    ("tokens", "miss_tokens", "cache-miss tokens"),
    ("output-tokens", "output_tokens", "output tokens"),
)
STORE_TIMEOUT_S = 0.5  # a Redis nearby answers in a millisecond; one that takes longer is down


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one tenant, key or end user: counts per minute, and concurrent requests.

    None is no limit.
    """

    requests: int | None = None
    miss_tokens: int | None = None
    output_tokens: int | None = None
    concurrency: int | None = None


NO_LIMIT = Quota()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """Quotas of each tenant and each key; `tenants` and `keys` name the exceptions."""

    tenant: Quota = field(default_factory=Quota)
    key: Quota = field(default_factory=Quota)
    tenants: Mapping[str, Quota] = field(default_factory=dict)
    keys: Mapping[str, Quota] = field(default_factory=dict)

    def of_tenant(self, tenant: str, overrides: Mapping[str, int]) -> Quota:
        """A tenant's quota; `overrides` are the limits an admin set, by field; 0 is no limit."""
        quota = self.tenants.get(tenant, self.tenant)
        known = {name: value or None for name, value in overrides.items() if name in OF_TENANT}
        return replace(quota, **known) if known else quota


def of_user(overrides: Mapping[str, int]) -> Quota | None:
    """The quota of each end user of a tenant; None if the tenant is not divided by them."""
    mine = {name: overrides[f"user_{name}"] for name in OF_TENANT if f"user_{name}" in overrides}
    return Quota(**{name: value or None for name, value in mine.items()}) if mine else None


Overrides = Callable[[str], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class _Window:
    """One per-minute limit of one holder, and its name in OpenAI's headers."""

    holder: Holder
    what: str
    item: RateLimitItem
    words: str


class _Reading(NamedTuple):
    window: _Window
    reset_s: float
    remaining: int


class WindowLimits:
    """Limits over a store of the `limits` library. Event loop only.

    `pool` holds the connections if the store is Redis. `overrides` returns the limits an admin set
    for a tenant and must not block.
    """

    def __init__(
        self,
        settings: LimitSettings,
        storage: Storage,
        places: Places | None = None,
        pool: "ConnectionPool | None" = None,
        breaker: CircuitBreaker | None = None,
        overrides: Overrides = lambda tenant: {},
    ) -> None:
        self._users = EndUsers()
        self._settings = settings
        self._overrides = overrides
        self._limiter = FixedWindowRateLimiter(storage)
        self._places = places or LocalPlaces()
        self._pool = pool
        self._breaker = breaker or CircuitBreaker()

    def user_of(self, principal: Principal, user: str) -> str:
        divided = of_user(self._overrides(principal.tenant)) is not None
        return self._users.name(principal.tenant, user) if divided else ""

    async def admit(self, principal: Principal, user: str = "") -> "Permit":
        quotas = [each for each in self._quotas(principal, user) if each[1] != NO_LIMIT]
        if not quotas:
            return Permit(self)
        member = secrets.token_hex(8)
        await self._take_place(member, quotas)
        windows = [window for holder, quota in quotas for window in _windows(holder, quota)]
        try:
            readings = await self._enter(windows)
        except BaseException:
            await self._places.leave(member)
            raise
        return Permit(self, member, windows, _headers(readings))

    async def close(self) -> None:
        await self._places.close()
        if self._pool is not None:
            await self._pool.aclose()

    async def leave(self, member: str, windows: Sequence[_Window], usage: Usage) -> None:
        """Gives a request's place back, and counts what it used against its windows."""
        await self._places.leave(member)
        used = {"tokens": usage.miss, "output-tokens": usage.output}
        for window in windows:
            cost = used.get(window.what, 0)
            if not cost or self._breaker.lasts:
                continue
            try:
                await self._limiter.hit(window.item, *window.holder, cost=cost)
            except StorageError as error:
                self._breaker.begin(error.storage_error)

    async def _enter(self, windows: Sequence[_Window]) -> list[_Reading]:
        """Readings after this request was booked. Raises RateLimited if any window is used up."""
        if self._breaker.lasts:
            return []
        try:
            before = [await self._read(window) for window in windows]
            used_up = [reading for reading in before if reading.remaining <= 0]
            if used_up:
                raise _refusal(max(used_up, key=lambda reading: reading.reset_s), before)
            for reading in before:
                window = reading.window
                if window.what == "requests" and not await self._limiter.hit(
                    window.item, *window.holder
                ):
                    raise _refusal(reading, before)  # another request took the last one meanwhile
            return [  # only these changed
                await self._read(each.window) if each.window.what == "requests" else each
                for each in before
            ]
        except StorageError as error:
            self._breaker.begin(error.storage_error)
            return []

    async def _read(self, window: _Window) -> _Reading:
        stats = await self._limiter.get_window_stats(window.item, *window.holder)
        reset_s = max(0.0, stats.reset_time - time.time())
        if reset_s > window.item.get_expiry() + 1:  # the clock was set back since it began
            await self._limiter.clear(window.item, *window.holder)
            return _Reading(window, 0.0, window.item.amount)
        return _Reading(window, reset_s, stats.remaining)

    def _quotas(self, principal: Principal, user: str) -> Iterator[tuple[Holder, Quota]]:
        settings, overrides = self._settings, self._overrides(principal.tenant)
        yield Holder("tenant", principal.tenant), settings.of_tenant(principal.tenant, overrides)
        if user and (quota := of_user(overrides)) is not None:
            yield Holder("user", f"{principal.tenant}:{user}"), quota
        if principal.key_id:
            yield Holder("key", principal.key_id), settings.keys.get(principal.key_id, settings.key)

    async def _take_place(self, member: str, quotas: Sequence[tuple[Holder, Quota]]) -> None:
        wanted = {who: quota.concurrency for who, quota in quotas if quota.concurrency is not None}
        full = await self._places.enter(member, wanted)
        if full is not None:
            raise RateLimited(
                f"This {full.kind} has {wanted[full]} requests running, as many as it may; wait "
                "for one to end.",
                headers={"Retry-After": str(CONCURRENCY_RETRY_S)},
            )


@dataclass(frozen=True, slots=True)
class Permit:
    """The place of one admitted request; its answer carries `headers`."""

    limits: WindowLimits
    member: str = ""  # without a limit, no place was taken
    windows: Sequence[_Window] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    async def close(self, usage: Usage) -> None:
        """Gives the place back and counts what was used. Called once."""
        await self.limits.leave(self.member, self.windows, usage)


def open_limits(
    settings: LimitSettings, url: str, overrides: Overrides = lambda tenant: {}
) -> WindowLimits:
    """Limits counted at `memory://` or a `redis://` URL. Raises `limits`' ConfigurationError."""
    places, pool, breaker = None, None, CircuitBreaker()
    options: dict[str, Any] = {}
    if not url.startswith("memory"):
        from redis.asyncio import ConnectionPool

        timeouts = {"socket_timeout": STORE_TIMEOUT_S, "socket_connect_timeout": STORE_TIMEOUT_S}
        pool = ConnectionPool.from_url(url, **timeouts)
        places = RedisPlaces(pool, breaker=breaker)
        options = {"connection_pool": pool, "implementation": "redispy"}
    storage = storage_from_string(f"async+{url}", wrap_exceptions=True, **options)
    assert isinstance(storage, Storage), url
    return WindowLimits(settings, storage, places, pool, breaker, overrides)


def _windows(holder: Holder, quota: Quota) -> Iterator[_Window]:
    for what, name, words in COUNTED:
        if (amount := getattr(quota, name)) is not None:
            item = RateLimitItemPerMinute(amount, namespace=f"cachesvc-{what}")
            yield _Window(holder, what, item, words)


def _refusal(worst: _Reading, readings: Sequence[_Reading]) -> RateLimited:
    window, wait_s = worst.window, max(1, round(worst.reset_s + 0.5))
    hint = " Prompt tokens served from the cache do not count." if window.what == "tokens" else ""
    return RateLimited(
        f"This {window.holder.kind} has used its {window.item.amount} {window.words} of this "
        f"minute; retry in {wait_s} s.{hint}",
        headers={"Retry-After": str(wait_s), **_headers(readings)},
    )


def _headers(readings: Sequence[_Reading]) -> dict[str, str]:
    """OpenAI's x-ratelimit headers, from the tightest window of each kind."""
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
