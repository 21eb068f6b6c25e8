"""What the wire needs from the rest of the house, as protocols, and the one value that carries it.

`cachesvc.service` builds the real parts and passes them to `api.app.create_app`; tests pass those
of `api.testing`. The event loop alone uses them, except where a method says otherwise.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from api.cache.feeds import Feeds
from billing.accounts import Tenant
from engine.request import FinishReason, Request
from tiers.blocks.keys import CacheScope

if TYPE_CHECKING:
    from api.access.auth import Gatekeeper, Salts
    from api.access.limits import RateLimits
    from api.journal.journal import Journal
    from api.requests.bridge import OutputBridge
    from api.requests.idempotency import AnswerStore
    from api.requests.metering import Meter
    from api.requests.turns import Conversations
    from api.shapes.structured import GrammarDesk


class EngineClient(Protocol):
    """The engine's face: thread-safe, never blocking."""

    def submit(self, request: Request) -> None: ...

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> None: ...


class Tokenizer(Protocol):
    """Text to ids and back. Calls may come from several threads at once."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_token_bytes(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> "array[int]": ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> "array[int]": ...

    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer(Protocol):
    """One sequence's ids to text that is safe to send; finds stop strings."""

    stopped: bool

    def feed(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A name that clients may ask for: the base model, or an adapter on it.

    `scope` lacks only the tenant's salt. `detokenizer` makes one per sequence from the stop
    strings. `max_context` is what the engine can hold of prompt and answer together.
    """

    name: str
    tokenizer: Tokenizer
    detokenizer: Callable[[Sequence[str]], Detokenizer]
    scope: CacheScope
    max_context: int
    vocab_size: int
    adapter: str | None = None
    parent: str | None = None
    created: int = 0  # Unix seconds
    owned_by: str = "cachesvc"

    @property
    def max_chars(self) -> int:
        """A longer text has more tokens than the context, whatever it says.

        A token stands for as many bytes of the text as tokenizers see; where they compose it first
        (Unicode's NFC), up to four characters have become one.
        """
        return 4 * self.tokenizer.max_token_bytes * self.max_context


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served now, and a sentence about it; `detail` is shown as JSON."""

    ready: bool
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSettings:
    """Bounds of the wire. Sizes in bytes, times in seconds."""

    max_body_bytes: int = 4 << 20
    max_choices: int = 64  # prompts times n of one request
    write_timeout_s: float = 60.0  # a client that reads nothing for so long has gone
    keepalive_s: float = 15.0  # an SSE comment after so long without an output
    inline_encode_chars: int = 2_000  # longer texts are tokenised in the thread pool
    perceptual_digests: bool = False  # whether contents may be named approximately
    default_completion_tokens: int = 16  # /v1/completions without max_tokens, as OpenAI does


@dataclass(frozen=True, slots=True, kw_only=True)
class Collaborators:
    """Everything the routes use; lives as `app.state.wire`, immutable."""

    engine: EngineClient
    bridge: "OutputBridge"
    models: Mapping[str, ServedModel]  # the first is the default
    gatekeeper: "Gatekeeper"
    salts: "Salts"
    meter: "Meter"
    limits: "RateLimits"
    journal: "Journal"
    replays: "AnswerStore | None" = None  # None: Idempotency-Key is ignored
    grammars: "GrammarDesk | None" = None  # None: structured output is refused
    conversations: "Conversations | None" = None  # None: nobody is told where turns part
    encoders: Executor
    balances: Callable[[str], Tenant]  # of a tenant; may read a store, called off the loop
    readiness: Callable[[], Readiness]
    render_metrics: Callable[[], tuple[bytes, str]]  # body and its content type
    settings: WireSettings
    receipt_keys: Mapping[str, str] = field(default_factory=dict)  # public keys in hex, by id
    feeds: Feeds = field(default_factory=Feeds)  # listeners to what happens to blocks
