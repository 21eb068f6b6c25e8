"""The values of one request on its way: what to generate, its text, what it came to, its bill.

Frozen values, made on the event loop; they depend on no route and no collaborator.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from api.served_model import ServedModel
from billing.gate.holds import RequestContext
from billing.gate.outcomes import Outcome
from billing.prices.book import RateRef
from billing.prices.rating import Line
from billing.usage import EMPTY, Usage
from engine.request import (
    FinishReason,
    Lookup,
    Picture,
    SamplingParams,
    Timeline,
    TokenLogprob,
)
from engine.structure import Grammar, GrammarSource
from tiers.blocks.contents import Content
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.errors import MissReason
from tiers.policy.retention import Pin


class DivergenceReason(StrEnum):
    """Why a turn's tokens part from the earlier turn's although the messages agree."""

    TEMPLATE = "template"  # it writes the old messages as another text
    TOKENIZER = "tokenizer"  # the same text, in other tokens than it was generated in


@dataclass(frozen=True, slots=True)
class Divergence:
    """`of_tokens` the earlier turn left for messages that came again; only `at_token` match."""

    at_token: int
    of_tokens: int
    reason: DivergenceReason


@dataclass(frozen=True, slots=True)
class Turn:
    """One request's messages: `keys[i]` names the conversation up to and with message i."""

    keys: tuple[bytes, ...]
    roles: tuple[str, ...]
    owner: bytes = b""  # a digest of the tenant's salt


@dataclass(frozen=True, slots=True)
class Transcript:
    """One choice of an answer: what the client read, and the tokens it was generated in."""

    text: str
    tokens: tuple[int, ...]


HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Keep:
    """Requested with a prompt: keep its first `num_tokens` for this long."""

    num_tokens: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """The conversation that a request belongs to, by the client's name for it.

    `pause_s` is how long it may pause after this request, 0 where it ends with it; None where that
    is to be learned. While the session runs its `parent` waits.
    """

    name: str
    parent: str = ""
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A pin as its owner sees it. `name` is the owner's own name for it."""

    pin: Pin[PrefixKey]
    name: str
    expires_s: float  # by the clock on the wall


@dataclass(frozen=True, slots=True)
class Bill:
    """What settling a request came to. Amounts are decimal strings in `currency`."""

    usage: Usage = EMPTY
    currency: str | None = None
    cost: str | None = None
    saved: str | None = None  # against the same tokens with no cache
    price_version: str | None = None
    rate: RateRef | None = None  # the price that it was rated at
    lines: tuple[Line, ...] = ()
    receipt: Callable[[], Mapping[str, Any]] | None = None  # signs when called


@dataclass(frozen=True, slots=True)
class Asked:
    """Which parts of the vendor block a client asked for."""

    details: bool = False
    receipt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to generate. `prompts` are token ids, each not empty; `stop` strings are not either."""

    request_id: str
    model: ServedModel
    prompts: "tuple[array[int], ...]"
    params: SamplingParams
    scope: CacheScope  # with the tenant's salt
    tenant: str = ""  # whose part of the engine it takes
    stop: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()  # special tokens that are part of the answer's text
    source: GrammarSource | None = None  # what the answer must look like
    grammar: Grammar | None = None  # `source`, compiled
    turn: Turn | None = None  # the chat's messages, where their tokens are to be remembered
    divergence: Divergence | None = None  # from what the chat's earlier turn left
    message_of: Callable[[str], Mapping[str, Any]] | None = None  # an answer as chats send it back
    replayed_tokens: int = 0  # of the prompt: as the earlier turn left them
    dropped_lines: tuple[str, ...] = ()  # rules that dropped a line that changes each time
    cache: bool = True
    keeps: tuple[Keep, ...] = ()  # of its one prompt
    session: Session | None = None
    stream: bool = False  # text is sent as it comes, else the whole answer at its end
    arrival_ns: int = 0
    context: RequestContext = field(default_factory=RequestContext)  # for the ledger
    contents: tuple[tuple[Content, ...], ...] = ()  # of each prompt; none where it is empty
    pictures: tuple[Picture, ...] = ()  # that native contents of its one prompt are tiles of

    def only_prompt(self) -> "Job":
        """The same prompt with no answer, and no turn to be remembered."""
        params = replace(self.params, max_tokens=0, min_tokens=0)
        return replace(self, params=params, source=None, turn=None)

    @property
    def max_output(self) -> int:
        """The most output tokens that all choices together may have."""
        limit = self.params.max_tokens
        return (self.model.max_context if limit is None else limit) * self.num_choices

    @property
    def tokens_for_1h(self) -> int:
        """Leading tokens that are to be kept for an hour or longer."""
        return max((keep.num_tokens for keep in self.keeps if keep.for_s >= HOUR_S), default=0)

    @property
    def tokens_marked(self) -> int:
        """Leading tokens that the request asked to keep."""
        return max((keep.num_tokens for keep in self.keeps), default=0)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def engine_ids(self) -> tuple[str, ...]:
        if len(self.prompts) == 1:
            return (self.request_id,)
        return tuple(f"{self.request_id}.{number}" for number in range(len(self.prompts)))


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. `tokens` are those behind it that were not told of before."""

    choice: int  # index in the answer: prompt number * n + sequence index
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it


@dataclass(frozen=True, slots=True)
class Served:
    """What a request came to, and the `usage` that is billed for it."""

    outcome: Outcome
    usage: Usage
    miss_reasons: Mapping[MissReason, int]
    timeline: Timeline  # of the first prompt
    error: str | None = None
    approximate_tokens: int | None = None  # hits across perceptual contents; None: there were none
    lookups: tuple[Lookup, ...] = ()  # of the prompts that were admitted
    finishes: tuple[FinishReason | None, ...] = ()  # of the choices
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()  # by prompt, where asked for
    transcripts: tuple[Transcript, ...] = ()  # of the choices, where the job is a chat's turn
    divergence: Divergence | None = None
    replayed_tokens: int = 0
    dropped_lines: tuple[str, ...] = ()
    jumped_tokens: int = 0  # decode steps that a grammar's forced tokens saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """How a delivery ended: what was sent, and whether the client was there to the last byte."""

    status: int
    served: Served
    bill: Bill | None
    complete: bool
    error: Exception | None
    first_byte_ns: int
