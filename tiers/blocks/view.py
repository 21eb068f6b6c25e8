"""One block as operators see it, for routes, pages and trees."""

from typing import NamedTuple

from tiers.blocks.keys import PrefixKey

COMPUTING, LOADING = "computing", "loading"  # places of a block whose KV is not complete yet


class BlockView(NamedTuple):
    """A block in one or several tiers. Ages are seconds before now."""

    key: PrefixKey | None  # None: partly filled, so no block can continue it
    parent: PrefixKey | None
    scope: PrefixKey | None
    place: str  # the hottest tier that holds it, or COMPUTING or LOADING
    tiers: tuple[str, ...]  # every tier that holds it, the hottest first
    tokens: bytes  # int32 ids
    hits: int
    idle_s: float
    age_s: float  # since it entered the cache, as far as the tier knows
    num_requests: int = 0  # running requests that use it
    is_clean: bool = False  # a lower tier holds it too: evicting it costs nothing
