"""Stored responses, which clients can read or continue until newer ones need the space.

Names are made with the tenant's salt, so tenants are separate. The latest are in memory, and all
are in `kept`. Event loop only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.requests.kept import NOTHING, KeptAnswers, KeptBodies

MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, its input items, and the whole chat up to it."""

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]
    messages: Sequence[dict[str, Any]]


class StoredResponses(KeptAnswers[KeptResponse]):
    """At most `max_bytes` in memory; the least recently used leave first."""

    def __init__(self, max_bytes: int = MAX_BYTES, kept: KeptBodies = NOTHING) -> None:
        super().__init__("response", KeptResponse, max_bytes, kept)
