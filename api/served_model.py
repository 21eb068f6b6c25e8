"""A model as the wire sees it, and the protocol of the engine behind it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from api.errors import ContextLengthExceeded, ModelNotFound
from engine.errors import RemoteAway
from engine.promise import Promise
from engine.request import FinishReason, Request, StepOutput
from tiers.blocks.keys import CacheScope

if TYPE_CHECKING:
    from engine.remote.upstreams import Upstreams
    from engine.text.tokenizer import Tokenizer


NO_ENGINE = "No engine of this model answers now; try again later."


class EngineClient(Protocol):
    """The engine's interface for the wire: thread-safe, never blocking."""

    def submit(self, request: Request) -> None: ...

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, index: int | None = None
    ) -> None: ...

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        """How long a prompt of this many tokens from `share` would wait to begin."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a model's requests pass to as they are: `sites` that speak the clients' protocols.

    `model` is their name of the model. `key` is ours there. `salted` are the paths where they
    keep prompts of different `cache_salt` apart. `counts_one`: of several prompts in a request they
    count the first alone. `began` and `ended` are told of each request that passes.
    """

    sites: "Upstreams"
    model: str
    key: str = field(default="", repr=False)
    salted: frozenset[str] = frozenset()
    counts_one: bool = False
    began: Callable[[], None]
    ended: Callable[[StepOutput], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model name for clients: the base model, or an adapter on it.

    `scope` lacks only the tenant's salt. `max_context` is the maximum of prompt and answer tokens
    together.
    """

    name: str
    tokenizer: "Tokenizer"
    scope: CacheScope
    max_context: int
    vocab_size: int
    adapter: str | None = None
    parent: str | None = None
    created: int = 0  # Unix seconds
    exactness: Mapping[str, Any] | None = None  # what serves it, for clients
    promise: Promise | None = None  # what a hit leaves equal; None: unknown
    endpoint: Endpoint | None = None  # where its requests pass to; None: the engine here
    is_absent: bool = False  # no engine of it has answered yet, so its context is not known

    @property
    def max_chars(self) -> int:
        """A text longer than this has more tokens than the context, whatever it contains.

        It follows from the longest token in bytes. If the tokenizer composes the text first
        (Unicode's NFC), up to four characters may become one.
        """
        return 4 * self.tokenizer.max_token_bytes * self.max_context

    def check_chars(self, num_chars: int, param: str) -> None:
        """Raises ContextLengthExceeded for a text that is too long to read."""
        if num_chars > self.max_chars:
            at_least = num_chars * self.max_context // self.max_chars
            raise ContextLengthExceeded(
                f"{self.too_long(at_least)} It has {num_chars} characters, which are as many "
                "tokens or more. Shorten the prompt.",
                param=param,
            )

    def room_for_answer(
        self, prompt_tokens: int, max_tokens: int | None, *, prompt: str, limit: str = "max_tokens"
    ) -> int:
        """The maximum of answer tokens. `prompt` and `limit` name the fields for the error.

        Raises ContextLengthExceeded with the numbers.
        """
        room = self.max_context - prompt_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"{self.too_long(prompt_tokens)} Shorten the prompt.", param=prompt
            )
        if max_tokens is not None and max_tokens > room:
            raise ContextLengthExceeded(
                f"input length and `{limit}` exceed context limit: {prompt_tokens} + {max_tokens} "
                f"> {self.max_context}, the model's maximum context length. Shorten the prompt, or "
                f"set {limit} to {room} at most.",
                param=limit,
            )
        return room if max_tokens is None else max_tokens

    def too_long(self, num_tokens: int) -> str:
        """In the words that clients of both protocols look for. One token is left for the
        answer."""
        return (
            f"prompt is too long: {num_tokens} tokens > {self.max_context - 1} maximum; the "
            f"model's maximum context length is {self.max_context} tokens."
        )


def find_model(models: Mapping[str, ServedModel], name: str | None) -> ServedModel:
    """As `named`. Raises RemoteAway for a model that is absent."""
    model = named(models, name)
    if model.is_absent:
        raise RemoteAway(NO_ENGINE)
    return model


def named(models: Mapping[str, ServedModel], name: str | None) -> ServedModel:
    """The model of that name, or the first without one. Raises ModelNotFound, with the served
    names."""
    try:
        return models[name] if name else next(iter(models.values()))
    except KeyError:
        served = ", ".join(f"'{known}'" for known in models)
        raise ModelNotFound(
            f"The model '{str(name)[:80]}' is not served here; served: {served}.", param="model"
        ) from None
