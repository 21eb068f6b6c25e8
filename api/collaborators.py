"""What the wire needs from the other packages: protocols, and one value that carries the parts.

`cachesvc.service` builds the real parts and passes them to `api.app.create_app`; tests pass those
of `tests.support.wire`. The event loop alone uses them, except where a method says otherwise.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from api.requests.kept import Purges
from api.requests.responses import StoredResponses
from api.served_model import EngineClient, ServedModel
from billing.tenants import Tenant
from engine.structure import Compiler

if TYPE_CHECKING:
    from api.access.auth import KeyGate, Salts
    from api.access.fair_pool import FairPool
    from api.access.overload import QueueBound
    from api.access.rate_limits import WindowLimits
    from api.journal.journal import Journal
    from api.requests.bridge import OutputBridge
    from api.requests.metering import LedgerMeter
    from api.requests.publishing import Publish
    from api.requests.quote import Quotes
    from api.requests.retention import Retention
    from api.requests.turns import Conversations
    from billing.idempotency import Idempotency
    from billing.operations.books import OpenBooks


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served now, with a sentence; `detail` is shown as JSON.

    If `alive` is False, only a restart helps.
    """

    ready: bool
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    alive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSettings:
    """Bounds of the wire. Sizes in bytes, times in seconds."""

    max_body_bytes: int = 4 << 20
    cors_origins: Sequence[str] = ()  # whose pages may use the public routes
    max_choices: int = 64  # prompts times n of one request
    write_timeout_s: float = 60.0  # disconnect a client that reads nothing for this long
    keepalive_s: float = 15.0  # send an SSE comment after this long without output
    inline_encode_chars: int = 2_000  # longer texts are tokenised in the thread pool
    default_completion_tokens: int = 16  # /v1/completions without max_tokens, as OpenAI does


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may ask, and how much at once."""

    gatekeeper: "KeyGate"
    salts: "Salts"
    limits: "WindowLimits"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """An engine, and what requests need beside it. `models` are those that it computes, by name."""

    engine: EngineClient
    models: Mapping[str, ServedModel]
    grammars: Compiler
    queue: "QueueBound"  # bounds who may wait for it
    retention: "Retention"
    quotes: "Quotes"
    publish: "Publish | None" = None  # None: no store is shared with other servers
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None  # runs while the app does


@dataclass(frozen=True, kw_only=True)
class Inference:
    """What turns a prompt into an answer."""

    engines: Sequence[EngineParts]
    bridge: "OutputBridge"
    encoders: "FairPool"  # tokenise long texts and compile grammars

    @cached_property
    def models(self) -> Mapping[str, ServedModel]:
        """By name; the first is the default."""
        return {name: model for each in self.engines for name, model in each.models.items()}

    @cached_property
    def queues(self) -> Sequence["QueueBound"]:
        return [each.queue for each in self.engines]

    def engine_of(self, model: ServedModel) -> EngineParts:
        return next(each for each in self.engines if model.name in each.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookkeeping:
    """What requests cost, and who has how much left."""

    meter: "LedgerMeter"
    balances: Callable[[str], Tenant]  # by tenant; may read a store: called off the loop
    opened: "OpenBooks"  # for what tenants ask of their own
    replays: "Idempotency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What is remembered of requests, and whose memory was purged."""

    journal: "Journal"
    conversations: "Conversations"
    responses: StoredResponses = field(default_factory=StoredResponses)
    purges: Purges = field(default_factory=Purges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collaborators:
    """Everything the routes use; stored as `app.state.wire`, immutable."""

    access: Access
    inference: Inference
    books: Bookkeeping
    records: Records
    settings: WireSettings
    readiness: Callable[[], Readiness]
    render_metrics: Callable[[], tuple[bytes, str]]  # body and its content type
    observe_http: Callable[[str, int, float], None] = lambda path, status, seconds: None
