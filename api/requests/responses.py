"""Responses that clients may ask for again, or go on from, until newer ones need their room.

In memory, each tenant's apart: a restart forgets them, and an answer that was not stored is not
found. Event loop only.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """A response; the items that it answered; and the whole chat that it ended."""

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]
    messages: Sequence[dict[str, Any]]
    num_bytes: int


class StoredResponses:
    """At most `max_bytes` of them, least recently used out first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self.num_bytes = 0

    def put(
        self,
        tenant: str,
        response: dict[str, Any],
        items: Sequence[dict[str, Any]],
        messages: Sequence[dict[str, Any]],
    ) -> None:
        size = sum(len(orjson.dumps(part)) for part in (response, items, messages))
        self.delete(tenant, response["id"])
        self._kept[tenant, response["id"]] = Kept(response, items, messages, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.delete(*next(iter(self._kept)))

    def get(self, tenant: str, name: str) -> Kept | None:
        found = self._kept.get((tenant, name))
        if found is not None:
            self._kept.move_to_end((tenant, name))
        return found

    def delete(self, tenant: str, name: str) -> bool:
        found = self._kept.pop((tenant, name), None)
        if found is not None:
            self.num_bytes -= found.num_bytes
        return found is not None
