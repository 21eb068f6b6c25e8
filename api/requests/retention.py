"""Blocks kept for tenants after their requests: breakpoints and sessions, as soft pins.

If a request asks to keep its prompt, the prompt is pinned after it is served. A session's blocks
are pinned between turns, for as long as its tenant usually pauses, which is learned here. While a
session runs, its parent's blocks are pinned too. Memory is bounded by tenant, so that endless
sessions gain nothing. Event loop only; nothing here waits, and a failure costs only hits.
"""

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from api.job import Job, Kept, Served, Session
from billing.gate.outcomes import Outcome
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import PrefixKey
from tiers.policy.retention import PinKind

FIRST_PAUSE_S = 60.0  # until enough pauses have been seen
MIN_PAUSE_S, MAX_PAUSE_S = 10.0, 600.0  # bounds of the learned pause
MIN_SAMPLES = 8
MAX_SAMPLES = 200  # latest pauses of a tenant
PAUSE_QUANTILE = 0.9  # of pauses that a session's blocks outlive ...
PAUSE_MARGIN = 1.25  # ... and a little longer
MAX_SESSIONS = 256  # of a tenant, with the time of their last turn
MAX_TENANTS = 1024


class TenantPins(Protocol):
    """The pins of tenants in the running cache."""

    @property
    def block_size(self) -> int: ...

    def retain(
        self,
        name: str,
        root: PrefixKey,
        tokens: "array[int]",
        for_s: float,
        *,
        owner: str,
        kind: PinKind,
    ) -> None:
        """Pin without waiting. A failure is logged."""
        ...

    def renew(self, name: str, for_s: float) -> None:
        """Extend a pin of that name to `for_s` from now, if there is one."""
        ...

    def release(self, name: str) -> None:
        """End a pin of that name, if there is one."""
        ...

    async def keep(
        self, name: str, prefix: Chain | KeyedPrefix, for_s: float, *, owner: str
    ) -> Kept:
        """Pin a cache, durably. Raises CacheNotKept, and CacheNotPaid for its first hour."""
        ...

    async def end(self, name: str, *, owner: str) -> bool:
        """End a pin, durably. Returns whether the owner had one of that name."""
        ...

    async def of_owner(self, owner: str) -> Sequence[Kept]: ...


@dataclass(slots=True)
class Pauses:
    """One tenant's recent pauses, and when each session's last turn ended."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    ended: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def usual_s(self) -> float:
        if len(self.latest) < MIN_SAMPLES:
            return FIRST_PAUSE_S
        usual = sorted(self.latest)[int(PAUSE_QUANTILE * (len(self.latest) - 1))] * PAUSE_MARGIN
        return min(MAX_PAUSE_S, max(MIN_PAUSE_S, usual))


class Retention:
    """Keeps blocks as requests begin and end. `pins` also serves the explicit caches.

    A session is kept for as long as its tenant usually pauses, or for the time its request gives.
    """

    def __init__(self, pins: TenantPins, clock: Callable[[], float] = time.monotonic) -> None:
        self.pins = pins
        self._clock = clock
        self._tenants: OrderedDict[str, Pauses] = OrderedDict()

    def began(self, job: Job) -> None:
        """A turn begins: its session's pause is over, and its parent still waits."""
        session = job.session
        if session is None:
            return
        pauses = self._pauses(job.tenant)
        ended = pauses.ended.get(session.name)
        if ended is not None:
            pauses.latest.append(self._clock() - ended)
        if session.parent:
            self.pins.renew(_pin_name(job, session.parent), pauses.usual_s())

    def ended(self, job: Job, served: Served) -> None:
        """Pin what a served request asked to keep."""
        if served.outcome is not Outcome.FINISHED or not job.cache:
            return
        for keep in job.keeps:
            tokens = job.prompts[0][: keep.num_tokens]
            digest = xxhash.xxh3_128_hexdigest(job.scope.root() + tokens.tobytes())
            name = f"{job.tenant}:kept-{digest[:16]}"
            self._retain(job, name, tokens, keep.for_s, PinKind.BREAKPOINT)
        if job.session is not None:
            self._keep_session(job, job.session, served)

    def _keep_session(self, job: Job, session: Session, served: Served) -> None:
        pauses, name = self._pauses(job.tenant), _pin_name(job, session.name)
        usual_s = pauses.usual_s() if session.pause_s is None else session.pause_s
        if session.parent:
            self.pins.renew(_pin_name(job, session.parent), usual_s)
        if session.pause_s == 0:
            pauses.ended.pop(session.name, None)
            self.pins.release(name)
            return
        pauses.ended[session.name] = self._clock()
        pauses.ended.move_to_end(session.name)
        if len(pauses.ended) > MAX_SESSIONS:
            pauses.ended.popitem(last=False)
        answer = served.transcripts[0].tokens if served.transcripts else ()
        tokens = job.prompts[0] + array("i", answer)
        self._retain(job, name, tokens, usual_s, PinKind.SESSION)

    def _retain(
        self, job: Job, name: str, tokens: "array[int]", for_s: float, kind: PinKind
    ) -> None:
        root = job.scope.root()
        self.pins.retain(name, root, tokens, for_s, owner=job.tenant, kind=kind)

    def _pauses(self, tenant: str) -> Pauses:
        pauses = self._tenants.pop(tenant, None) or Pauses()
        self._tenants[tenant] = pauses
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return pauses


def _pin_name(job: Job, session: str) -> str:
    digest = xxhash.xxh3_128_hexdigest(job.scope.root() + session.encode())
    return f"{job.tenant}:session-{digest[:16]}"
