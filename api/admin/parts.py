"""What the admin routes need from the other packages, as one value.

`cachesvc.server.dashboard` fills it in from the running server, tests from fakes. Each area of the
admin pages adds the fields it needs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from fastapi import Request

from api.admin.login.guard import LoginForms, LoginLimits
from api.admin.login.sessions import Sessions
from api.errors import RecordNotFound
from billing.errors import UnknownDeposit, UnknownHold, UnknownKey, UnknownTenant
from billing.operations.books import OpenBooks
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import PrefixKey
from tiers.policy.retention import Pin

if TYPE_CHECKING:
    from api.access.rate_limits import LimitSettings
    from api.cache.explorer import Explorer
    from api.journal.journal import Journal
    from billing.accounts import Accounts
    from tiers.blocks.view import BlockView


class Trail(Protocol):
    """Leaves an audit entry: who changed what, the values before and after, and why. Blocks."""

    def __call__(
        self, action: str, subject: str, *, by: str, after: Any = None, reason: str = ""
    ) -> None: ...


class History(Protocol):
    """Samples of the server's counters over time."""

    def read(
        self, series: Sequence[str], *, window_s: float, since_s: float = 0.0
    ) -> Mapping[str, Any]:
        """Times and one list of values for each of `series`; see
        `cachesvc.observability.history`."""
        ...

    def over(self, series: Sequence[str], *, window_s: float) -> Mapping[str, float | None]:
        """Each series as one number: over the window, or for `value:` the current value."""
        ...


# Blocks above the disk, as `tiers.memory.view` reads them, in short turns between the engine's
# steps.
MemoryReader = Callable[[], Awaitable[Sequence["BlockView"]]]


class CacheAdmin(Protocol):
    """Changes the running cache. Each call returns when the change is complete, on disk as well."""

    @property
    def block_size(self) -> int: ...

    async def pin(
        self, name: str, prefix: Chain | KeyedPrefix, until_s: float, why: str
    ) -> Pin[PrefixKey]:
        """Raises PinError."""
        ...

    async def unpin(self, name: str) -> bool: ...

    async def pins(self) -> Sequence[Pin[PrefixKey]]: ...

    async def prefix_of(self, key: PrefixKey) -> KeyedPrefix:
        """The prefix that ends with a block; no keys if a block is missing."""
        ...

    async def evict(self, keys: Sequence[PrefixKey]) -> Mapping[str, int]:
        """Blocks removed, by tier."""
        ...

    async def purge(self, kind: str, name: str, *, by: str, why: str) -> dict[str, Any]:
        """The signed receipt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """The collaborators of the admin routes; immutable."""

    sessions: Sessions
    keys: "Accounts"
    operator_token: str  # grants everything; this machine's command line reads it from a file
    record: Trail
    stats: Callable[[], Mapping[str, Any]]  # a JSON snapshot of the whole server
    journal: "Journal"  # of recent requests
    explorer: "Explorer"  # reads all tiers
    decode: Callable[[Sequence[int]], str]  # token ids to text
    outline: Callable[[Sequence[int]], Sequence[tuple[str, int]]]  # role and size of each message
    limits: "LimitSettings"  # of requests and tokens a minute
    currencies: Callable[[], Sequence[str]]  # of all applied rate cards, the newest first
    history: History
    alerts: Callable[[], Awaitable[Sequence[Mapping[str, str]]]]  # firing now
    books: OpenBooks  # accounts and ledger
    blocks: MemoryReader  # of the tiers in memory
    cache: "CacheAdmin"  # to change the tiers
    login_limits: LoginLimits = field(default_factory=LoginLimits)
    login_forms: LoginForms = field(default_factory=LoginForms)


def parts_of(request: Request) -> AdminParts:
    """The parts of the router that this request came through."""
    return cast(AdminParts, request.state.admin_parts)


def books_of(request: Request) -> OpenBooks:
    """The books of this request's server.

    Changes by other processes are read first, so an admin sees them at once. Blocks.
    """
    books = parts_of(request).books
    books.accounts.refresh()
    return books


async def add_audit_entry(
    request: Request, by: str, action: str, subject: str, *, why: str = "", after: Any = None
) -> None:
    """Leaves an audit entry for a change or a look that has no transaction of its own."""
    record = parts_of(request).record
    await asyncio.to_thread(record, action, subject, by=by, after=after, reason=why)


@contextmanager
def found() -> Iterator[None]:
    """Turns an unknown tenant, key or request in a path into a 404."""
    try:
        yield
    except (UnknownTenant, UnknownKey, UnknownHold, UnknownDeposit) as error:
        raise RecordNotFound(str(error)) from error
