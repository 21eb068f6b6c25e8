"""A model as the wire sees it, and the protocols of the engine and tokenizers behind it."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.promise import Promise
from engine.request import FinishReason, Picture, Request
from tiers.blocks.contents import Content
from tiers.blocks.keys import CacheScope


class EngineClient(Protocol):
    """The engine's interface for the wire: thread-safe, never blocking."""

    def submit(self, request: Request) -> None: ...

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> None: ...

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        """How long a prompt of this many tokens from `share` would wait to begin."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back. Thread-safe."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_token_bytes(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> "array[int]": ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> "array[int]": ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer(Protocol):
    """Turns one sequence's ids into text that is safe to send; finds stop strings."""

    stopped: bool
    stop_string: str | None

    def feed(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class NewDetokenizer(Protocol):
    """Makes a detokenizer from stop strings and the special tokens to show as text."""

    def __call__(self, stop: Sequence[str], *, shown: Sequence[str] = ()) -> Detokenizer: ...


class ImageReader(Protocol):
    """How a model reads images; see `engine.vision.pictures`. Thread-safe."""

    @property
    def tile_tokens(self) -> int: ...

    @property
    def mark(self) -> str:
        """What a chat template writes in place of an image."""
        ...

    def read(self, data: bytes) -> Picture: ...

    def expanded(self, text: str, pictures: Sequence[Picture]) -> str: ...

    def contents(
        self, tokens: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[Content, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model name for clients: the base model, or an adapter on it.

    `scope` lacks only the tenant's salt. `detokenizer` makes one per sequence. `max_context` is the
    maximum of prompt and answer tokens together.
    """

    name: str
    tokenizer: Tokenizer
    detokenizer: NewDetokenizer
    scope: CacheScope
    max_context: int
    vocab_size: int
    images: ImageReader | None = None  # None: the model takes no images
    adapter: str | None = None
    parent: str | None = None
    created: int = 0  # Unix seconds
    owned_by: str = "cachesvc"
    exactness: Mapping[str, Any] | None = None  # what serves it, for clients
    promise: Promise | None = None  # what a hit leaves equal; None: unknown

    @property
    def max_chars(self) -> int:
        """A text longer than this has more tokens than the context, whatever it contains.

        It follows from the longest token in bytes. If the tokenizer composes the text first
        (Unicode's NFC), up to four characters may become one.
        """
        return 4 * self.tokenizer.max_token_bytes * self.max_context
