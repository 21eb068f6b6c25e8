"""A server's engine with what is beneath it: our own over its tiers, or one in another process.

It is created stopped. `close` returns the number of blocks not saved. `blocks` and `disk_view` are
None where the blocks are in another process: what operators see comes from the engine and from its
node, and what they change is changed in the node.
"""

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Never, Protocol, TypeAlias, TypeVar

from api.served_model import Endpoint, EngineClient
from engine.promise import Promise
from engine.request import StepOutput
from engine.stats import EngineStats
from engine.structure import Compiler
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.errors import PurgeFailed
from tiers.node.counters import NodeCounters
from tiers.operations.below import done
from tiers.operations.face import CacheOperations
from tiers.policy.quota import QuotaShares
from tiers.policy.retention import Pin, PinError
from tiers.stats import CacheStats
from tiers.steady_clock import SteadyClock
from tiers.telemetry.events import EventStream
from tiers.tier import TierName, TierStats

if TYPE_CHECKING:
    from engine.composition import Core  # torch

T = TypeVar("T")
Backend: TypeAlias = "Core | CoreElsewhere"
Deliver = Callable[[Sequence[StepOutput]], None]
MakeBackend = Callable[[Deliver, EventStream, QuotaShares | None], Backend]


class ServedEngine(EngineClient, Protocol):
    """An engine elsewhere, for the server itself; as `engine.engine.Engine` is."""

    max_tokens: int

    @property
    def failure(self) -> BaseException | None: ...

    def call(self, function: Callable[[CacheOperations], T]) -> "Future[T]": ...

    def stats(self) -> EngineStats: ...


class OperationsElsewhere(CacheOperations, Protocol):
    """Those of a node, or of none."""

    counters: NodeCounters

    def tell_owners(self, owners: Mapping[PrefixKey, str]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreElsewhere:
    """A `Backend`. `opened` closes the engine and what runs beside it."""

    loaded: Any  # it has the tokenizer and the vocab_size
    layout: BlockLayout
    scope: CacheScope
    operations: "OperationsElsewhere"
    engine: ServedEngine
    grammars: Compiler  # what it refuses does not reach an engine that others share
    promise: Promise
    opened: ExitStack
    adapters: Mapping[str, bytes] = field(default_factory=dict)  # digests by name
    facts: Mapping[str, str] = field(default_factory=dict)
    endpoint: Endpoint | None = None  # where requests pass to as they are
    is_absent: bool = False  # no engine of the model has answered yet
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None  # runs while the app does
    disk_view: None = None  # the node has the disk
    blocks: None = None  # they are in the engine and in the node

    @property
    def is_shared(self) -> bool:
        """Whether other machines can load what is published here."""
        return self.operations.counters.is_shared

    def start(self, warm_up_tokens: int = 0) -> None:
        """Does nothing: the engine is warm."""

    def tell_owners(self, owners: Mapping[PrefixKey, str]) -> None:
        """Passes the owners of scopes on, for quotas."""
        self.operations.tell_owners(owners)

    def close(self) -> int:
        """Stops a vLLM that is ours. The node keeps running with the blocks."""
        self.opened.close()
        return 0


class NoBlocks:
    """The operations on blocks where only the engine keeps them."""

    def __init__(self) -> None:
        self.counters = NodeCounters()
        self._clock = SteadyClock()

    @property
    def now_s(self) -> float:
        return self._clock()

    def pin(self, *_: object, **__: object) -> Never:
        raise PinError("only the engine keeps blocks; pins need vLLM with a node below it")

    def unpin(self, name: str) -> bool:
        return False

    def pins(self) -> list[Pin[PrefixKey]]:
        return []

    def saved(self) -> "Future[None]":
        return done(None)

    def publish(self, chain: Chain) -> "Future[int]":
        return done(0)

    def purge(self, roots: Collection[PrefixKey]) -> Never:
        raise PurgeFailed(
            "only the engine keeps blocks, with no node below it: restart it, or this server if "
            "it is this server's vLLM"
        )

    def tell_owners(self, owners: Mapping[PrefixKey, str]) -> None:
        """Does nothing."""


def cache_stats(
    layout: BlockLayout, node: NodeCounters, num_device_blocks: int = 0, kv_usage: float = 0.0
) -> CacheStats:
    """Stats with the engine's own cache as device, of which `kv_usage` is in use (0 to 1), and the
    node's host and disk, which all its users share."""
    nbytes = layout.nbytes
    used = round(kv_usage * num_device_blocks)
    return CacheStats(
        device=TierStats(
            name=TierName.DEVICE,
            num_blocks=used,
            used_bytes=used * nbytes,
            logical_bytes=used * nbytes,
            capacity_bytes=num_device_blocks * nbytes,
        ),
        host=node.host(),
        below=node.below(),
        events=node.events(),
        collisions=node.total("collisions"),
        num_listeners=node.num_listeners,
        block_bytes=nbytes,
        num_pins=node.total("num_pins"),
        pinned_blocks=node.total("pinned_blocks"),
        pinnable_blocks=node.total("pinnable_blocks"),
        groups=node.groups(),
    )
