"""Concurrency limits: how many requests of one key or tenant run at once, on one server or many.

`LocalPlaces` counts in memory. `RedisPlaces` keeps a sorted set for each holder, with a member for
each running request. A member's score is the end of its lease by Redis' own clock. A server renews
the leases of its requests while it runs, so the places of a killed server become free again. If the
store does not answer, requests are let in. Event loop only.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from redis.asyncio import ConnectionPool

logger = logging.getLogger(__name__)

PAUSE_S = 3.0
LEASE_S = 30.0
RENEWALS_PER_LEASE = 3

# KEYS: a set for each holder; ARGV: member, lease in seconds, then each holder's places. Returns 0
# once the member is in every set, else the number of the first set that is full.
_ENTER = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
for i, key in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  if redis.call('ZCARD', key) >= tonumber(ARGV[i + 2]) then return i end
end
for _, key in ipairs(KEYS) do
  redis.call('ZADD', key, now + ARGV[2], ARGV[1])
  redis.call('EXPIRE', key, math.ceil(ARGV[2]) + 1)
end
return 0
"""

# KEYS and ARGV[2...]: a set and a member for each place; ARGV[1]: lease in seconds.
_RENEW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
for i, key in ipairs(KEYS) do
  redis.call('ZADD', key, 'XX', now + ARGV[1], ARGV[i + 1])
  redis.call('EXPIRE', key, math.ceil(ARGV[1]) + 1)
end
"""


class CircuitBreaker:
    """Leaves a failing store of limits alone for `PAUSE_S` after its latest failure.

    One request waits for the store in vain, instead of every request. Limits are off meanwhile.
    """

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._until_s = float("-inf")

    @property
    def lasts(self) -> bool:
        return self._clock_s() < self._until_s

    def begin(self, error: Exception) -> None:
        if not self.lasts:
            logger.warning("limits are off for %s s: their store fails: %s", PAUSE_S, error)
        self._until_s = self._clock_s() + PAUSE_S


class Holder(NamedTuple):
    """Whose quota it is: ("key", id), ("tenant", name) or ("user", tenant:user)."""

    kind: str
    name: str


class LocalPlaces:
    """Places of several holders, counted in this process."""

    def __init__(self) -> None:
        self._running: Counter[Holder] = Counter()
        self._members: dict[str, tuple[Holder, ...]] = {}

    async def enter(self, member: str, wanted: Mapping[Holder, int]) -> Holder | None:
        """Takes one place of each holder, or none at all. `wanted` maps each holder to its limit.

        Returns None when taken, else the holder that is full.
        """
        for holder, places in wanted.items():
            if self._running[holder] >= places:
                return holder
        self._members[member] = tuple(wanted)
        self._running.update(wanted.keys())
        return None

    async def leave(self, member: str) -> None:
        holders = self._members.pop(member, ())
        self._running.subtract(holders)
        for holder in holders:
            if not self._running[holder]:
                del self._running[holder]

    async def close(self) -> None:
        """Does nothing: there is no connection."""


class RedisPlaces:
    """The same counted in Redis, for all servers that share it."""

    def __init__(
        self,
        pool: "ConnectionPool",
        *,
        lease_s: float = LEASE_S,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        from redis.asyncio import Redis
        from redis.exceptions import RedisError

        self._client = Redis(connection_pool=pool)
        self._errors = (RedisError, OSError)
        self._enter = self._client.register_script(_ENTER)
        self._renew = self._client.register_script(_RENEW)
        self._lease_s = lease_s
        self._breaker = breaker or CircuitBreaker()
        self._server = secrets.token_hex(4)
        self._members: dict[str, tuple[str, ...]] = {}  # our running requests' sets
        self._renewing: asyncio.Task[None] | None = None

    async def enter(self, member: str, wanted: Mapping[Holder, int]) -> Holder | None:
        if not wanted or self._breaker.lasts:
            return None
        sets = tuple(f"cachesvc-running/{holder.kind}/{holder.name}" for holder in wanted)
        name = self._name(member)
        try:
            full = cast(int, await self._enter(sets, [name, self._lease_s, *wanted.values()]))
        except self._errors as error:
            self._breaker.begin(error)
            return None
        if full:
            return list(wanted)[full - 1]
        self._members[name] = sets
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._keep_leases())
        return None

    async def leave(self, member: str) -> None:
        """Gives the places back. If the store does not answer, they become free when the lease
        ends."""
        name = self._name(member)
        sets = self._members.pop(name, ())
        if self._breaker.lasts:
            return
        try:
            for key in sets:
                await self._client.zrem(key, name)
        except self._errors as error:
            self._breaker.begin(error)

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)

    def _name(self, member: str) -> str:
        return f"{self._server}:{member}"

    async def _keep_leases(self) -> None:
        """Renews leases while this server has requests under a limit."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            places = [(key, name) for name, sets in self._members.items() for key in sets]
            if not places:
                self._renewing = None
                return
            keys, members = zip(*places, strict=True)
            try:
                await self._renew(keys, [self._lease_s, *members])
            except self._errors as error:
                self._breaker.begin(error)


Places = LocalPlaces | RedisPlaces
