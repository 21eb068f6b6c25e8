"""A server's interface to its engine: our own over its tiers, or vLLM over a node.

`engine.composition.Core` and `cachesvc.server.vllm.core.CoreElsewhere` implement it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from api.cache.explorer import BlockCaller
from api.served_model import EngineClient, NewDetokenizer
from engine.engine import EngineStats
from engine.promise import Promise
from engine.request import StepOutput
from engine.structure import Compiler
from engine.text.tokenizer import Tokenizer
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.disk.inspection.view import DiskView
from tiers.operations.face import CacheOperations
from tiers.policy.quota import QuotaShares
from tiers.telemetry.events import EventStream

T = TypeVar("T")


class ServedEngine(EngineClient, Protocol):
    """The engine's interface for the server itself; see `engine.engine.Engine`."""

    max_tokens: int

    @property
    def failure(self) -> BaseException | None: ...

    def call(self, function: Callable[[CacheOperations], T]) -> "Future[T]": ...

    def stats(self) -> EngineStats: ...


class AdapterDigests(Protocol):
    """LoRA adapters by name, with digests of their contents."""

    @property
    def digests(self) -> Mapping[str, bytes]: ...


class Weights(Protocol):
    """The part of the loaded model that the wire needs."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def adapters(self) -> AdapterDigests: ...


class Backend(Protocol):
    """The engine. It is created stopped. `close` returns the number of blocks not saved."""

    @property
    def loaded(self) -> Weights: ...

    @property
    def layout(self) -> BlockLayout: ...

    @property
    def scope(self) -> CacheScope: ...

    @property
    def facts(self) -> Mapping[str, str]:
        """Engine, device, dtypes, processor and versions by name; empty if the scope does not know
        the contents of the model."""

    @property
    def promise(self) -> Promise:
        """What a hit leaves equal."""

    @property
    def operations(self) -> CacheOperations: ...

    @property
    def blocks(self) -> BlockCaller | None:
        """Calls the engine for what only a cache in this process can tell; None without one."""

    @property
    def disk_view(self) -> Callable[[], AbstractContextManager[DiskView]] | None:
        """Opens the disk tier for inspection; None if this process has none."""

    @property
    def engine(self) -> ServedEngine: ...

    @property
    def is_shared(self) -> bool: ...

    @property
    def grammars(self) -> Compiler: ...

    def tell_owners(self, owners: Mapping[PrefixKey, str]) -> None:
        """Passes the owners of scopes to tiers in another process."""

    def start(self, warm_up_tokens: int = 0) -> None: ...

    def close(self) -> int: ...

    @property
    def detokenizer(self) -> NewDetokenizer: ...


Deliver = Callable[[Sequence[StepOutput]], None]
MakeBackend = Callable[[Deliver, EventStream, QuotaShares | None], Backend]
