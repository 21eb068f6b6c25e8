"""One block as operators see it: the value that leaves the tiers for routes, pages and trees."""

from typing import NamedTuple

from tiers.blocks.keys import PrefixKey

COMPUTING, LOADING = "computing", "loading"  # where a block is whose KV does not stand yet


class BlockView(NamedTuple):
    """A block in one tier or several. Ages are seconds of now."""

    key: PrefixKey | None  # None: partly filled, so that nothing can continue it
    parent: PrefixKey | None
    scope: PrefixKey | None
    place: str  # the hottest tier that holds it, or COMPUTING or LOADING
    tiers: tuple[str, ...]  # every tier that holds it, the hottest first
    tokens: bytes  # int32 ids
    hits: int
    idle_s: float
    age_s: float  # since it came into the cache, as far as the tier knows
    pins: int = 0  # requests that use it now
    is_clean: bool = False  # a lower tier holds it too: evicting it costs nothing
    depth: int | None = None  # its number in its prompt, from 0; a disk record does not know it
