"""Names of tenants' end users, for their limits and their shares; bounded, as clients invent them.

A user is a label of a request. A table holds who was seen in the last minute, the length of a
limit's window. Tenants share its places (`api.access.shares`). When it is full, new users count
together as one, `OTHERS`, until places become free. Event loop only.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from api.access.shares import Shares

MOST: Final = 65_536  # 20 MB
KEPT_S: Final = 60.0
OTHERS: Final = "others"


class EndUsers:
    """Invariant: at most `most` users are known, and each was seen within `KEPT_S` of the last."""

    def __init__(self, *, most: int = MOST, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._places = Shares(most)
        self._clock_s = clock_s
        self._seen: OrderedDict[tuple[str, str], float] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._seen)

    def name(self, tenant: str, user: str) -> str:
        """A short name for a user of a tenant. Requests without a user are one user's."""
        now_s = self._clock_s()
        self._forget(now_s - KEPT_S)
        key = tenant, hashlib.blake2b(user.encode(), digest_size=8).hexdigest()
        if key not in self._seen and not self._places.take(tenant):
            return OTHERS
        self._seen[key] = now_s
        self._seen.move_to_end(key)
        return key[1]

    def _forget(self, before_s: float) -> None:
        while self._seen:
            (tenant, name), seen_s = next(iter(self._seen.items()))
            if seen_s >= before_s:
                return
            del self._seen[tenant, name]
            self._places.give_back(tenant)
